"""Changes the source of Horovod's last release, so that it builds with current TensorFlow, Python and CUDA."""

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

_OWN_INTERFACE = """  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = """

CHANGES = {
    "horovod/tensorflow/CMakeLists.txt": {
        # Removes optional XLA operations. Current TensorFlow lacks their headers, and no other file refers to them.
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n': "",
        # TensorFlow finds the libraries of NVIDIA's wheels in the same way.
        'PROPERTIES OUTPUT_NAME "mpi_lib"': 'PROPERTIES OUTPUT_NAME "mpi_lib" BUILD_RPATH "$ORIGIN/../../nvidia/nccl/lib"',
    },
    "horovod/tensorflow/mpi_ops.cc": {
        # Current TensorFlow no longer has this function.
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n": "",
        "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n": _GPU_STREAM,
    },
    "horovod/common/ops/cuda/CMakeLists.txt": {
        # Skips a library for TensorFlow with an older C++ ABI, which no longer exists. It would double the time of nvcc.
        "add_library(compatible_horovod_cuda_kernels ": "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL ",
    },
    # A process set would use the interface that the name of the host leads to, and not the one that Horovod was told.
    "horovod/common/gloo/gloo_context.cc": {_OWN_INTERFACE: _OWN_INTERFACE.replace("gloo_iface_", "global_context.gloo_iface_")},
    # Horovod intends to contain the CUDA runtime of its compiler. TensorFlow's library exports functions of the same names.
    # Horovod would call them instead, and so the runtime of another CUDA version.
    "CMakeLists.txt": {
        'if(NCCL_LIBRARY_FILE_NAME MATCHES "static" AND lowercase_CMAKE_CUDA_RUNTIME_LIBRARY': (
            "if(lowercase_CMAKE_CUDA_RUNTIME_LIBRARY"
        )
    },
    # NVIDIA's wheel contains the library under this name only.
    "cmake/Modules/FindNCCL.cmake": {'set(NCCL_LIBNAME "nccl")': 'set(NCCL_LIBNAME "libnccl.so.2")'},
    # Python 3.12 has no distutils.
    "horovod/runner/js_run.py": {
        "from distutils.spawn import find_executable": "from shutil import which as find_executable"
    },
}
"""For each file, the old texts and their replacements."""


def change_source(source: Path) -> None:
    """Applies the changes.

    Args:
        source: The folder of the unpacked release.

    Raises:
        TfrepError: A file does not contain a text to change exactly once.
    """
    for name, changes in CHANGES.items():
        text = (source / name).read_text("utf-8")
        for old, new in changes.items():
            if text.count(old) != 1:
                raise TfrepError(message("Horovod's source differs from the release.", file=name, missing=old))
            text = text.replace(old, new)
        (source / name).write_text(text, "utf-8")
