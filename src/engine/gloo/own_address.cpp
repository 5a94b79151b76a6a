#include "engine/gloo/own_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <lockstep/error.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <vector>

#include "base/posix.h"
#include "base/text.h"

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
                      text::format("The address of '{}' was not found: {}.\n"
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
    throw_errno(text::format("there is no route from this host to '{}'", peer),
                "Set MASTER_ADDR to an address in a network that this host is in.");
  }
  return text.data();
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address == "localhost";
}

struct NetworkAddress {
  std::string interface;
  std::string text;
};

// The IPv4 addresses of this host, without the loopback's.
std::vector<NetworkAddress> network_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, ::freeifaddrs);
  std::vector<NetworkAddress> addresses;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    const bool is_up = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_LOOPBACK) == 0;
    if (!is_up || each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
    ::inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size());
    addresses.push_back({each->ifa_name, text.data()});
  }
  return addresses;
}

}  // namespace

std::string own_address(const EngineContext& context) {
  const bool is_told = !context.master_address.empty();
  const std::string towards = is_told ? context.master_address : host_name();
  const std::string address = address_towards(towards, context.global_rank());
  if (!is_loopback(address)) return address;
  if (!is_loopback(towards)) {
    const auto others = network_addresses();
    if (others.size() == 1) return others.front().text;
  }
  throw UsageError(
      {.rank = context.global_rank(), .operation = "join"},
      text::format("The ranks are on several hosts, but the way to {} '{}' is the address {} here, "
                   "which other hosts cannot reach.\nSet {}GLOO_SOCKET_IFNAME to the network "
                   "interface that connects the hosts (ip -brief address lists them).",
                   is_told ? "MASTER_ADDR" : "this host's name", towards, address,
                   is_told ? "MASTER_ADDR to an address in their network, or " : ""));
}

void check_interface(const std::string& name, int rank) {
  std::string known;
  for (const NetworkAddress& address : network_addresses()) {
    if (address.interface == name) return;
    known += text::format("{}{} ({})", known.empty() ? "" : ", ", address.interface, address.text);
  }
  const unsigned index = ::if_nametoindex(name.c_str());
  // One with IPv6 alone is fine; Gloo finds its address.
  if (index != 0 && name != "lo") return;
  throw UsageError(
      {.rank = rank, .operation = "join"},
      text::format("GLOO_SOCKET_IFNAME is '{}', {}.\nSet it to the network interface that connects "
                   "the hosts; here are: {}.",
                   name,
                   index == 0 ? "and there is no such network interface"
                              : "which other hosts cannot reach, and the ranks are on several",
                   known.empty() ? "none" : known));
}

}  // namespace lockstep
