"""What is changed in the source of Horovod's last release, so that it fits to current TensorFlow, Python and CUDA."""

from __future__ import annotations

from pathlib import Path

from tfrep_strategy.errors import TfrepError, message

_GPU_STREAM = """#endif // TENSORFLOW_VERSION >= 2011000000
namespace stream_executor {
namespace gpu {
static GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
#endif // HAVE_GPU
"""

CHANGES = {
    "horovod/tensorflow/CMakeLists.txt": {
        # Optional operations for XLA, which current TensorFlow has no headers for; nothing else refers to them.
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n': "",
        # TensorFlow finds the libraries of NVIDIA's wheels in the same way.
        'PROPERTIES OUTPUT_NAME "mpi_lib"': 'PROPERTIES OUTPUT_NAME "mpi_lib" BUILD_RPATH "$ORIGIN/../../nvidia/nccl/lib"',
    },
    "horovod/tensorflow/mpi_ops.cc": {
        # Current TensorFlow has this function no more.
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n": "",
        "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n": _GPU_STREAM,
    },
    "horovod/common/ops/cuda/CMakeLists.txt": {
        # For TensorFlow with an older C++ ABI, which there is no more; it would double the time of nvcc.
        "add_library(compatible_horovod_cuda_kernels ": "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL ",
    },
    # Horovod means to have the CUDA runtime of its compiler inside. TensorFlow's library exports functions of the same names,
    # which would be taken instead, and call the runtime of another CUDA.
    "CMakeLists.txt": {
        'if(NCCL_LIBRARY_FILE_NAME MATCHES "static" AND lowercase_CMAKE_CUDA_RUNTIME_LIBRARY': (
            "if(lowercase_CMAKE_CUDA_RUNTIME_LIBRARY"
        )
    },
    # NVIDIA's wheel has the library by this name alone.
    "cmake/Modules/FindNCCL.cmake": {'set(NCCL_LIBNAME "nccl")': 'set(NCCL_LIBNAME "libnccl.so.2")'},
    # Python 3.12 has no distutils.
    "horovod/runner/js_run.py": {
        "from distutils.spawn import find_executable": "from shutil import which as find_executable"
    },
}
"""In each file, old text and new."""


def change_source(source: Path) -> None:
    """Makes the changes.

    Args:
        source: The folder of the unpacked release.

    Raises:
        TfrepError: A file does not hold a text that is to be changed, exactly once.
    """
    for name, changes in CHANGES.items():
        text = (source / name).read_text("utf-8")
        for old, new in changes.items():
            if text.count(old) != 1:
                raise TfrepError(message("Horovod's source is not the one that was released.", file=name, lacks=old))
            text = text.replace(old, new)
        (source / name).write_text(text, "utf-8")
