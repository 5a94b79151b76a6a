// The Gloo engine: LibTorch's ProcessGroupGloo, bound to an address that the other hosts reach.
//
// LibTorch contains Gloo without its headers; those of libgloo-dev serve, because only the names
// of Gloo's types are used here, never their insides.

#include <lockstep/error.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <sstream>

#include "base/env.h"
#include "base/posix.h"
#include "base/text.h"
#include "engine/engines.h"
#include "engine/gloo/own_address.h"

namespace lockstep {
namespace {

using Gloo = c10d::ProcessGroupGloo;
using Device = std::shared_ptr<gloo::transport::Device>;

// GLOO_DEVICE_TRANSPORT chooses among what this LibTorch was built with.
[[noreturn]] void throw_no_device(int rank, const c10::Error& error) {
  const auto transport = Environment::of_process().get("GLOO_DEVICE_TRANSPORT");
  if (!transport) throw error;
  throw UsageError({.rank = rank, .operation = "join"},
                   text::format("GLOO_DEVICE_TRANSPORT is {}, and Gloo says: {}\nUnset it; "
                                "LibTorch's own builds have TCP only, and TCP_TLS needs one that "
                                "was built with USE_GLOO_WITH_OPENSSL.",
                                *transport, error.what_without_backtrace()));
}

// GLOO_SOCKET_IFNAME, then the address that reaches the master. Ranks that have one loopback use
// that.
std::vector<Device> devices_for(const EngineContext& context) {
  if (context.is_one_network()) return {Gloo::createDeviceForHostname("127.0.0.1")};
  const auto interfaces = Environment::of_process().get("GLOO_SOCKET_IFNAME");
  if (!interfaces) return {Gloo::createDeviceForHostname(own_address(context))};
  std::vector<Device> devices;
  std::istringstream names(*interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    check_interface(name, context.global_rank());
    devices.push_back(Gloo::createDeviceForInterface(name));
  }
  return devices;
}

std::set<int> tcp_sockets() {
  std::set<int> sockets;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int protocol = 0;
    socklen_t size = sizeof protocol;
    if (::getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 &&
        protocol == IPPROTO_TCP) {
      sockets.insert(fd);
    }
  }
  return sockets;
}

// A host that is cut off says nothing, and TCP alone would wait for it for many minutes. Gloo has
// no option for it, so this is done to the sockets that it has opened.
void notice_lost_hosts(const std::set<int>& sockets_before, int lost_after) {
  constexpr int kInterval = 1;  // seconds
  constexpr int kCount = 3;
  const int idle = lost_after - kCount * kInterval;  // seconds without a word until it is asked
  const int unanswered = 1000 * lost_after;          // milliseconds
  constexpr int kOn = 1;
  for (const int fd : tcp_sockets()) {
    if (sockets_before.contains(fd)) continue;
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kInterval, sizeof kInterval);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kCount, sizeof kCount);
    ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, sizeof unanswered);
  }
}

}  // namespace

std::string why_no_gloo() { return {}; }

Backend make_gloo(const EngineContext& context) {
  const NoSigpipe no_sigpipe;  // Gloo's threads write to ranks that may be gone
  auto options = Gloo::Options::create(context.connect_timeout);
  try {
    options->devices = devices_for(context);
  } catch (const c10::Error& error) {
    throw_no_device(context.global_rank(), error);
  }
  // `lockstep run --lost-after` sets it, so that launchers and ranks lose a host together.
  const int lost_after = Environment::of_process().get_int("LOCKSTEP_LOST_AFTER", 4).value_or(8);
  const std::set<int> sockets_before = tcp_sockets();
  Backend gloo = c10::make_intrusive<Gloo>(context.store, context.rank, context.size(), options);
  notice_lost_hosts(sockets_before, lost_after);
  gloo->setTimeout(context.timeout);
  // Nobody goes away before all are connected: Gloo takes a connection that is closed then for a
  // crash.
  if (context.store->add("connected", 1) == context.size()) context.store->set("all", "connected");
  context.store->wait({"all"}, context.connect_timeout);
  return gloo;
}

}  // namespace lockstep
