"""Changes the source of Horovod's last release, so that it builds with current TensorFlow, Python and CUDA, and needs a secret.

The lines of Horovod and Gloo are quoted under the licences of those projects, see NOTICE.
"""

from __future__ import annotations

from pathlib import Path

from tfrep_strategy.errors import TfrepError, message

MARK = "+tfrep"
"""The end of the version of a Horovod that was built from the changed source."""

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

_TCP = "third_party/gloo/gloo/transport/tcp"

_LISTENS = """  self_ = Address::fromSockName(fd);

  // Register with device so we're called when peer connects
"""
_LISTENS_AT_DOOR = """  const auto pass = Pass::draw();
  self_ = Address::fromSockName(fd);
  self_.setPass(pass);
  door_.reset(new Door(fd, pass));
  fd_ = door_->descriptor();

  // Register with device so we're called when peer connects
"""

_CONNECTS = """  ::close(fd_);

  // Create new socket to connect to peer.
"""
_CALLS = """  ::close(fd_);
  door_.reset();
  call();

  // Wait for connection to complete
  waitUntilConnected(lock, true);
}

void Pair::call() {
  int rv;
  const auto& peerAddr = peer_.getSockaddr();
  const socklen_t addrlen = peerAddr.ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);

  // Create new socket to connect to peer.
"""
_CALL_ENDS = """  device_->registerDescriptor(fd_, EPOLLIN | EPOLLOUT, this);

  // Wait for connection to complete
  waitUntilConnected(lock, true);
}
"""

_ACCEPTS = """  struct sockaddr_storage addr;
  socklen_t addrlen = sizeof(addr);
  int rv;

  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);

  // Close the listening file descriptor whether we've successfully connected
  // or run into an error and will throw an exception.
"""
_ADMITS = """  const int rv = door_->admit();
  if (rv == -1) {
    return;
  }

"""
_ACCEPT_FAILS = """  if (rv == -1) {
    signalException(GLOO_ERROR_MSG("accept: ", strerror(errno)));
    return;
  }
"""

_KNOCKS = """
  // Common connection-made code
  handleConnected();
}

void Pair::handleConnected() {
"""
_KNOCKS_AND_HEARS = """
  bool isCut = optval != 0;
  if (!isCut && !ear_) {
    ear_.reset(new Ear(peer_.getPass().answer));
    isCut = !say(fd_, peer_.getPass().knock);
    device_->registerDescriptor(fd_, EPOLLIN, this);
  }
  const auto heard = isCut ? Ear::WRONG : ear_->hear(fd_);
  if (heard == Ear::NOT_ALL) {
    return;
  }
  ear_.reset();
  if (heard == Ear::RIGHT) {
    handleConnected();
    return;
  }

  // The peer had too many guests. This is tried until waitUntilConnected gives up.
  device_->unregisterDescriptor(fd_, this);
  ::close(fd_);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  try {
    call();
  } catch (const ::gloo::IoException&) {
    // The pair has kept it for the thread that waits.
  }
}

void Pair::handleConnected() {
"""

_ASKS_RENDEZVOUS = "      http::Response response = request.send(method, body);\n"
_ASKS_WITH_SECRET = """      std::vector<std::string> headers;
      if (const char* secret = std::getenv("HOROVOD_GLOO_RENDEZVOUS_SECRET")) {
        headers.push_back(std::string("Authorization: Bearer ") + secret);
      }
      http::Response response = request.send(method, body, headers);
"""

ADDED = {f"{_TCP}/door.h": Path(__file__).with_name("door.h").read_text("utf-8")}
"""New files and their content."""

CHANGES = {
    "horovod/__init__.py": {"__version__ = '0.28.1'": f"__version__ = '0.28.1{MARK}'"},
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
    # A process set would use the interface of the host's name instead of the one that Horovod was given.
    "horovod/common/gloo/gloo_context.cc": {_OWN_INTERFACE: _OWN_INTERFACE.replace("gloo_iface_", "global_context.gloo_iface_")},
    # A rank shows the run's secret to the rendezvous. Without it, every program on the machine could read the addresses.
    "horovod/common/gloo/http_store.cc": {
        "#include <cstring>\n": "#include <cstdlib>\n#include <cstring>\n",
        _ASKS_RENDEZVOUS: _ASKS_WITH_SECRET,
    },
    # A pair accepts only its peer. The address of each pair contains a pass, which the peer shows (`door.h`).
    f"{_TCP}/address.h": {
        '#include "gloo/transport/address.h"\n': '#include "gloo/transport/address.h"\n#include "gloo/transport/tcp/door.h"\n',
        "  sequence_number_t getSeq() const {\n": (
            "  const Pass& getPass() const {\n    return impl_.pass;\n  }\n\n"
            "  void setPass(const Pass& pass) {\n    impl_.pass = pass;\n  }\n\n"
            "  sequence_number_t getSeq() const {\n"
        ),
        "    sequence_number_t seq{kSequenceNumberUnset};\n": (
            "    sequence_number_t seq{kSequenceNumberUnset};\n\n    Pass pass{};\n"
        ),
    },
    f"{_TCP}/address.cc": {
        "  impl_.ss = std::move(other.impl_.ss);\n  impl_.seq = other.impl_.seq;\n": "  impl_ = other.impl_;\n",
        "  impl_.ss = other.impl_.ss;\n  impl_.seq = other.impl_.seq;\n": "  impl_ = other.impl_;\n",
        "    : Address(other.impl_.ss, other.impl_.seq) {}": "    : impl_(other.impl_) {}",
    },
    f"{_TCP}/pair.h": {
        "  void connect(const Address& peer);\n": (
            "  void connect(const Address& peer);\n  void call();\n\n"
            "  // While strangers may connect: what hears them, or the answer of the peer.\n"
            "  std::unique_ptr<Door> door_;\n  std::unique_ptr<Ear> ear_;\n"
        ),
    },
    f"{_TCP}/pair.cc": {
        "#include <sstream>\n": "#include <sstream>\n#include <thread>\n",
        _LISTENS: _LISTENS_AT_DOOR,
        _CONNECTS: _CALLS,
        _CALL_ENDS: "  device_->registerDescriptor(fd_, EPOLLIN | EPOLLOUT, this);\n}\n",
        _ACCEPTS: _ADMITS,
        _ACCEPT_FAILS: "  door_.reset();\n",
        "  if (optval != 0) {\n": "  if (optval != 0 && optval != ECONNRESET && optval != EPIPE) {\n",
        _KNOCKS: _KNOCKS_AND_HEARS,
        "      case LISTENING:\n": "      case LISTENING:\n        door_.reset();\n",
    },
    # Horovod means to contain its compiler's CUDA runtime. TensorFlow's library exports functions of the same names, so Horovod
    # would call the runtime of another CUDA version.
    "CMakeLists.txt": {
        'if(NCCL_LIBRARY_FILE_NAME MATCHES "static" AND lowercase_CMAKE_CUDA_RUNTIME_LIBRARY': (
            "if(lowercase_CMAKE_CUDA_RUNTIME_LIBRARY"
        )
    },
    # NVIDIA's wheel contains the library under this name only.
    "cmake/Modules/FindNCCL.cmake": {'set(NCCL_LIBNAME "nccl")': 'set(NCCL_LIBNAME "libnccl.so.2")'},
    # Python 3.12 has no distutils.
    "horovod/runner/js_run.py": {"from distutils.spawn import find_executable": "from shutil import which as find_executable"},
}
"""For each file, the old texts and their replacements."""


def change_source(source: Path) -> None:
    """Applies the changes.

    Args:
        source: The folder of the unpacked release.

    Raises:
        TfrepError: A text to change does not occur exactly once in its file.
    """
    for name, changes in CHANGES.items():
        text = (source / name).read_text("utf-8")
        for old, new in changes.items():
            if text.count(old) != 1:
                hint = "leave HOROVOD's source as it was downloaded; remove it, and install again."
                raise TfrepError(message("Horovod's source differs from the release.", hint, file=name, missing=old))
            text = text.replace(old, new)
        (source / name).write_text(text, "utf-8")
    for name, text in ADDED.items():
        (source / name).write_text(text, "utf-8")
