"""What a trace says, compared with traces that are made by hand, and with what a process is known to have done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from packaging.version import Version

from tfrep_strategy.cluster.profiles.summary import TraceReport
from tfrep_strategy.cluster.profiles.traces import Trace, times_of
from tfrep_strategy.core.tf import XSpace

pytestmark = pytest.mark.lane("quick")

START, DONE = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"


class Plane:
    """A plane of a trace, whose events are given in milliseconds."""

    def __init__(self, space: Any, name: str) -> None:
        self._plane = space.planes.add(name=name)
        self._lines: dict[str, Any] = {}

    def add(self, thread: str, name: str, begin: float, end: float, **stats: Any) -> None:
        line = self._lines.get(thread)
        if line is None:
            # Threads begin at different times, to which their events are relative.
            line = self._lines[thread] = self._plane.lines.add(name=thread, timestamp_ns=1000 * len(self._lines))
        event = line.events.add(metadata_id=self._key(self._plane.event_metadata, name))
        event.offset_ps, event.duration_ps = round(begin * 1e9) - 1000 * line.timestamp_ns, round((end - begin) * 1e9)
        for key, value in stats.items():
            stat = event.stats.add(metadata_id=self._key(self._plane.stat_metadata, key))
            if isinstance(value, str):
                stat.ref_value = self._key(self._plane.stat_metadata, value)
            else:
                stat.uint64_value = value

    def wait(self, number: int, kernel_type: str, begin: float | None, end: float | None) -> None:
        """Adds an asynchronous operation. It ends on a thread that comes before the one on which it begins."""
        if end is not None:
            self.add("a", DONE, end, end + 0.01, _c=number, kernel_type=kernel_type)
        if begin is not None:
            self.add("b", START, begin, begin + 0.01, _p=number, kernel_type=kernel_type)

    @staticmethod
    def _key(table: Any, name: str) -> int:
        for key, data in table.items():
            if data.name == name:
                return key
        key = len(table) + 1
        table[key].name = name
        return key


def told(space: Any, folder: Path) -> TraceReport:
    """Returns what is read of a trace, in milliseconds."""
    path = folder / "vm.xplane.pb"
    path.write_bytes(space.SerializeToString())
    found = times_of(path, "rank1")
    assert found.compute + found.collectives + found.input + found.idle == pytest.approx(found.traced)
    return found


def made() -> tuple[Any, Plane]:
    space = XSpace()
    host = Plane(space, "/host:CPU")
    host.add("python", "tfrep_profile", 10, 110)
    return space, host


def milliseconds(report: TraceReport) -> tuple[float, ...]:
    seconds = (report.compute, report.collectives, report.input, report.idle)
    return tuple(round(1000 * value, 3) for value in seconds)


def test_each_moment_counts_once(tmp_path: Path) -> None:
    space, host = made()
    host.add("tf_Compute", "mul:MatMul", 20, 30)
    host.add("tf_Compute/2", "mul_1:MatMul", 25, 40)  # On two threads: 20 to 40.
    host.wait(1, "CollectiveReduceV2", 35, 60)  # While nothing computes: 40 to 60.
    host.wait(2, "IteratorGetNext", 55, 70)  # While nothing of these: 60 to 70.
    host.wait(3, "_Recv", 65, 75)  # 70 to 75.
    host.wait(4, "StatefulPartitionedCall", 12, 100)  # Calls, and does nothing itself.
    assert milliseconds(told(space, tmp_path)) == (20, 25, 10, 45)


def test_what_lies_partly_in_the_trace(tmp_path: Path) -> None:
    space, host = made()
    host.add("tf_Compute", "mul:MatMul", 0, 20)
    host.add("tf_Compute", "mul:MatMul", 100, 200)
    host.wait(1, "HorovodAllreduce", None, 50)  # It began before the trace.
    host.wait(2, "IteratorGetNextAsOptional", 90, None)  # It ended after the trace.
    assert milliseconds(told(space, tmp_path)) == (20, 30, 10, 40)


def test_collectives_that_are_calls_of_python(tmp_path: Path) -> None:
    space, host = made()
    host.add("tf_Compute", "while/body/call/tfrep_collective_1:PyFunc", 20, 50)
    host.add("tf_Compute/2", "mul:MatMul", 30, 40)
    host.add("tf_Compute", "users:PyFunc", 60, 80)
    assert milliseconds(told(space, tmp_path)) == (30, 20, 0, 50)


@pytest.mark.parametrize(
    ("thread", "event"),
    [
        ("tf_data_private_threadpool/1", "mul:MatMul"),
        ("tf_Compute", "EagerService:Enqueue"),
        ("tf_Compute", "ExecutorState::Process"),
        ("tf_Compute", "Iterator::Root"),
        ("python", "EagerLocalExecute: __inference_train_1"),
    ],
)
def test_what_is_no_work_of_a_step(thread: str, event: str, tmp_path: Path) -> None:
    space, host = made()
    host.add(thread, event, 20, 90)
    assert milliseconds(told(space, tmp_path)) == (0, 0, 0, 100)


@pytest.mark.parametrize(
    ("kernel_type", "times"),
    [
        ("CollectiveGatherV2", (0, 50, 0, 50)),
        ("HorovodGroupedAllreduce", (0, 50, 0, 50)),
        ("NcclAllReduce", (0, 50, 0, 50)),
        ("_HostRecv", (0, 50, 0, 50)),
        ("IteratorGetNext", (0, 0, 50, 50)),
        ("MultiDeviceIteratorGetNextFromShard", (0, 0, 50, 50)),
    ],
)
def test_kinds_of_waits(kernel_type: str, times: tuple[float, ...], tmp_path: Path) -> None:
    space, host = made()
    host.wait(1, kernel_type, 20, 70)
    assert milliseconds(told(space, tmp_path)) == times


@pytest.mark.parametrize("event", ["EagerLocalExecute: MatMul", "CpuExecutable::ExecuteAsyncOnStream"])
def test_eager_operations_and_xla(event: str, tmp_path: Path) -> None:
    space, host = made()
    host.add("python", event, 20, 70)
    host.add("python", "EagerLocalExecute: IteratorGetNext", 70, 90)
    assert milliseconds(told(space, tmp_path)) == (50, 0, 20, 30)


def test_a_gpu_computes_when_its_streams_do(tmp_path: Path) -> None:
    space, host = made()
    host.add("tf_Compute", "mul:MatMul", 20, 25)  # Queues the kernel.
    gpu = Plane(space, "/device:GPU:0")
    gpu.add("Stream #13(Compute)", "gemm_kernel", 40, 60)
    gpu.add("Stream #14(Compute)", "ncclDevKernel_AllReduce_Sum_f32_RING", 50, 80)
    gpu.add("TensorFlow Ops", "mul:MatMul", 20, 90)  # Repeats it.
    assert milliseconds(told(space, tmp_path)) == (20, 20, 0, 60)


def test_steps_are_counted(tmp_path: Path) -> None:
    space, host = made()
    for number in range(3):
        host.add("python", "train", 20 + number, 21 + number, step_num=number)
    assert told(space, tmp_path).steps == 3


@pytest.mark.parametrize("way", ["eager", "function", "xla"])
def test_a_process_that_sleeps_and_computes(way: str, tmp_path: Path) -> None:
    def multiply(matrix: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matmul(matrix, matrix)

    matrix = tf.random.normal([700, 700])
    multiply = multiply if way == "eager" else tf.function(multiply, jit_compile=way == "xla")
    multiply(matrix)
    trace = Trace(tmp_path / "run", "rank3")
    trace.begin()
    time.sleep(0.3)
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3:
        multiply(matrix).numpy()
    report = trace.end()
    assert report.problem == ""
    assert 0.6 <= report.traced < 5
    assert report.idle >= 0.29
    # Before 2.21 TensorFlow tells of an instruction of XLA where it starts, and not of what it has other threads do.
    tells_all = way != "xla" or Version(tf.__version__) >= Version("2.21")
    assert report.compute > (0.1 * report.traced if tells_all else 0)
    (written,) = (tmp_path / "run").iterdir()
    assert written.name.endswith("_rank3.xplane.pb")


def test_a_second_trace_is_a_report_and_no_error(tmp_path: Path) -> None:
    tf.profiler.experimental.start(str(tmp_path / "own"))
    try:
        trace = Trace(tmp_path / "run", "rank0")
        trace.begin()
        report = trace.end()
    finally:
        tf.profiler.experimental.stop()
    assert "profiler is running" in report.problem
    assert list((tmp_path / "run").iterdir()) == []
    assert len(list((tmp_path / "own").rglob("*.xplane.pb"))) == 1
