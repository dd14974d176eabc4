// The door of a pair of Gloo. Gloo would take the first program that connects to a pair for the pair's peer.
//
// Each pair draws a pass, which is a part of its address. Ranks get addresses from each other, and strangers do not. Whoever
// connects says the first half of the pass, and the door answers with the second half.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <list>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gloo/common/logging.h"

namespace gloo {
namespace transport {
namespace tcp {

using Half = std::array<unsigned char, 16>;

struct Pass {
  Half knock;
  Half answer;

  static Pass draw() {
    Pass pass;
    const auto drawn = getrandom(&pass, sizeof(pass), 0);
    GLOO_ENFORCE_EQ(drawn, static_cast<ssize_t>(sizeof(pass)), "getrandom: ", strerror(errno));
    return pass;
  }
};

// Never waits: a half fits in the empty buffer of a new connection.
inline bool say(int fd, const Half& half) {
  return ::send(fd, half.data(), half.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(half.size());
}

// Hears one half, which may come in pieces.
class Ear {
 public:
  enum Heard { NOT_ALL, RIGHT, WRONG };

  explicit Ear(const Half& expected) : expected_(expected) {}

  // Reads no byte that comes after the half, and compares the whole half only: the time tells nothing about its parts.
  Heard hear(int fd) {
    const auto count = ::recv(fd, heard_.data() + count_, heard_.size() - count_, MSG_DONTWAIT);
    if (count == -1 && (errno == EAGAIN || errno == EINTR)) {
      return NOT_ALL;
    }
    if (count <= 0) {
      return WRONG;
    }
    count_ += count;
    if (count_ < heard_.size()) {
      return NOT_ALL;
    }
    unsigned char differences = 0;
    for (size_t i = 0; i < heard_.size(); i++) {
      differences |= heard_[i] ^ expected_[i];
    }
    return differences == 0 ? RIGHT : WRONG;
  }

 private:
  const Half expected_;
  Half heard_;
  size_t count_ = 0;
};

class Door {
 public:
  // The door closes the listener. The caller closes the descriptor.
  Door(int listener, const Pass& pass) : pass_(pass), listener_(listener), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    GLOO_ENFORCE_NE(epoll_, -1, "epoll_create1: ", strerror(errno));
    GLOO_ENFORCE_NE(fcntl(listener_, F_SETFL, O_NONBLOCK), -1, "fcntl: ", strerror(errno));
    watch(listener_);
  }

  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  ~Door() {
    for (auto& guest : guests_) {
      ::close(guest.fd);
    }
    ::close(listener_);
  }

  // It is readable when there is something for `admit` to do.
  int descriptor() const {
    return epoll_;
  }

  // Returns the connection of the peer once it has said its half, else -1. Never waits.
  int admit() {
    std::array<struct epoll_event, kMostGuests + 1> events;
    const auto count = epoll_wait(epoll_, events.data(), events.size(), 0);
    bool isCalled = false;
    for (int i = 0; i < count; i++) {
      const auto fd = events[i].data.fd;
      if (fd == listener_) {
        isCalled = true;
      } else if (hear(fd)) {
        return fd;
      }
    }
    for (size_t i = 0; isCalled && i < kMostGuests; i++) {
      const auto fd = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd == -1) {
        if (errno == EMFILE || errno == ENFILE) {
          sendAwayOldest();
        }
        break;
      }
      if (guests_.size() == kMostGuests) {
        sendAwayOldest();
      }
      guests_.push_back({fd, Ear(pass_.knock)});
      watch(fd);
      if (hear(fd)) {
        return fd;
      }
    }
    return -1;
  }

 private:
  // So many may be silent at once. When one more comes, the oldest has to go, and knocks again if it is the peer.
  static constexpr size_t kMostGuests = 16;

  struct Guest {
    int fd;
    Ear ear;
  };

  void watch(int fd) {
    struct epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    GLOO_ENFORCE_NE(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event), -1, "epoll_ctl: ", strerror(errno));
  }

  void forget(std::list<Guest>::iterator guest) {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, guest->fd, nullptr);
    guests_.erase(guest);
  }

  void sendAwayOldest() {
    if (!guests_.empty()) {
      const auto fd = guests_.front().fd;
      forget(guests_.begin());
      ::close(fd);
    }
  }

  // Returns whether a guest is the peer. It is no guest any more then, nor if it is a stranger.
  bool hear(int fd) {
    const auto guest =
        std::find_if(guests_.begin(), guests_.end(), [fd](const Guest& each) { return each.fd == fd; });
    const auto heard = guest == guests_.end() ? Ear::NOT_ALL : guest->ear.hear(fd);
    if (heard == Ear::NOT_ALL) {
      return false;
    }
    forget(guest);
    if (heard == Ear::RIGHT && say(fd, pass_.answer)) {
      return true;
    }
    ::close(fd);
    return false;
  }

  const Pass pass_;
  const int listener_;
  const int epoll_;
  std::list<Guest> guests_;
};

} // namespace tcp
} // namespace transport
} // namespace gloo
