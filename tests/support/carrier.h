// Carrier: host 1's way to host 0, on which a test can wait, or do something in between.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <functional>
#include <thread>

#include "base/posix.h"
#include "base/socket.h"

namespace lockstep::test {

class Carrier {
 public:
  // `open` gets each connection of host 1, one after the other, and returns one to host 0.
  explicit Carrier(std::function<Fd(const Fd& host1)> open)
      : open_(std::move(open)), thread_([this](const std::stop_token& stop) { run(stop); }) {}

  int port() const {
    sockaddr_in address{};
    socklen_t size = sizeof address;
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.sin_port);
  }

 private:
  // Copies what comes from one socket to the other; false at its end.
  static bool copy_some(const Fd& from, const Fd& to) {
    std::array<char, 4096> buffer{};
    const ssize_t count = ::recv(from.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN;
    return count > 0 &&
           ::send(to.get(), buffer.data(), static_cast<std::size_t>(count), MSG_NOSIGNAL) == count;
  }

  void run(const std::stop_token& stop) const {
    while (!stop.stop_requested()) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      if (::poll(&waiting, 1, 20) <= 0) continue;
      const Fd host1(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const Fd host0 = open_(host1);
      while (!stop.stop_requested()) {
        pollfd ends[2] = {{host1.get(), POLLIN, 0}, {host0.get(), POLLIN, 0}};
        ::poll(ends, 2, 20);
        if (!copy_some(host1, host0) || !copy_some(host0, host1)) break;
      }
    }
  }

  const Fd listener_ = listen_at("127.0.0.1", 0);
  const std::function<Fd(const Fd&)> open_;
  std::jthread thread_;
};

}  // namespace lockstep::test
