// The Gloo engine: LibTorch's ProcessGroupGloo, bound to an address that the other hosts reach.
//
// LibTorch contains Gloo without its headers; those of libgloo-dev serve, because only the names
// of Gloo's types are used here, never their insides.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <lockstep/error.h>
#include <netdb.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <array>
#include <cstdlib>
#include <memory>

#include "backend/engines.h"
#include "base/posix.h"

namespace lockstep {
namespace {

// The address of this host that packets to `peer` leave from. Nothing is sent: connecting a
// datagram socket only asks the kernel for the route.
std::string address_towards(const std::string& peer, int rank) {
  const ErrorPlace place{.rank = rank, .operation = "join"};
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int code = ::getaddrinfo(peer.c_str(), "9", &hints, &found); code != 0) {
    throw SystemError(place, 0,
                      fmt::format("The address of '{}' was not found: {}.\n"
                                  "Set MASTER_ADDR to a name or address that this host knows.",
                                  peer, ::gai_strerror(code)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  const Fd socket(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  std::array<char, NI_MAXHOST> text{};
  if (::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text.data(), text.size(), nullptr,
                    0, NI_NUMERICHOST) != 0) {
    throw_errno(fmt::format("there is no route from this host to '{}'", peer),
                "Set MASTER_ADDR to an address in a network that this host is in.");
  }
  return text.data();
}

}  // namespace

std::string why_no_gloo() { return {}; }

Backend make_gloo(const EngineContext& context) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(context.connect_timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (context.is_one_host()) {
    options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  } else if (interface != nullptr && *interface != '\0') {
    options->devices.push_back(Gloo::createDeviceForInterface(interface));
  } else if (!context.master_address.empty()) {
    options->devices.push_back(
        Gloo::createDeviceForHostname(address_towards(context.master_address, context.rank)));
  } else {
    options->devices.push_back(Gloo::createDefaultDevice());
  }
  Backend gloo = c10::make_intrusive<Gloo>(context.store, context.rank, context.size(), options);
  gloo->setTimeout(context.timeout);
  return gloo;
}

}  // namespace lockstep
