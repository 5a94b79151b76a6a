// EtcdServer: a real etcd (Debian: etcd-server) on loopback, which a test starts and ends by its
// pid.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/posix.h"
#include "base/process.h"
#include "base/socket.h"
#include "base/text.h"
#include "launch/etcd.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

namespace lockstep::test {

inline bool is_etcd_installed() {
  std::string path = std::getenv("PATH") != nullptr ? std::getenv("PATH") : "";
  path += ':';
  for (std::size_t colon; (colon = path.find(':')) != std::string::npos; path.erase(0, colon + 1)) {
    if (::access((path.substr(0, colon) + "/etcd").c_str(), X_OK) == 0) return true;
  }
  return false;
}

inline int port_of(const Fd& socket) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

class EtcdServer {
 public:
  EtcdServer() : port_(port_of(listen_at("127.0.0.1", 0))) {}
  ~EtcdServer() { kill(); }

  void start(const std::vector<std::string>& options = {}, const std::string& scheme = "http") {
    const std::string here = text::format("{}://127.0.0.1:{}", scheme, port_);
    const std::string log = folder_.path() + "/log";
    const Fd output(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    Command command{.arguments = {"etcd", "--data-dir", folder_.path() + "/data",
                                  "--listen-client-urls", here, "--advertise-client-urls", here,
                                  "--listen-peer-urls", "http://127.0.0.1:0", "--unsafe-no-fsync",
                                  // Leases are not shorter than one and a half of these.
                                  "--heartbeat-interval", "10", "--election-timeout", "100"},
                    .stdout_fd = output.get(),
                    .stderr_fd = output.get()};
    command.arguments.insert(command.arguments.end(), options.begin(), options.end());
    pid_ = spawn(command);
  }
  void start_and_wait() {
    constexpr auto kPatience = std::chrono::seconds(10);
    start();
    const auto limit = std::chrono::steady_clock::now() + kPatience;
    while (error_of([&] { client().get("some key"); }) != "no error") {
      ASSERT_LT(std::chrono::steady_clock::now(), limit)
          << read_small_file(folder_.path() + "/log");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  void suspend() const { ::kill(pid_, SIGSTOP); }
  void resume() const { ::kill(pid_, SIGCONT); }
  void kill() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

  int port() const { return port_; }
  const std::string& folder() const { return folder_.path(); }
  std::string url() const { return text::format("etcd://127.0.0.1:{}", port_); }
  Etcd client() const { return {url(), std::chrono::seconds(1)}; }

 private:
  const TempFolder folder_;
  const int port_;
  pid_t pid_ = 0;
};

}  // namespace lockstep::test
