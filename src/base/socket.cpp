#include "base/socket.h"

#include <lockstep/error.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <strings.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/text.h"

namespace lockstep {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses find_addresses(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) {
    throw SystemError({.operation = "join"}, 0,
                      text::format("The address of '{}' was not found: {}.\nGive a name or an "
                                   "address of the first rank's host (MASTER_ADDR, --master).",
                                   host, ::gai_strerror(code)));
  }
  return {found, ::freeaddrinfo};
}

// With or without its domain.
bool is_own_name(const std::string& host) {
  const auto first_label = [](const std::string& name) { return name.substr(0, name.find('.')); };
  return ::strcasecmp(first_label(host).c_str(), first_label(host_name()).c_str()) == 0;
}

// Whether this host's name stands for its loopback only because of its hosts file (Debian maps it
// to 127.0.1.1): other hosts would not reach it there. Who gives any other name of the loopback
// means it.
bool is_misleading_loopback(const std::string& host, const sockaddr* address) {
  if (host == "localhost" || !is_own_name(host)) return false;
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

}  // namespace

Fd listen_at(const std::string& host, int port) {
  const Addresses found = find_addresses(host, port);
  for (const addrinfo* info = found.get(); info != nullptr; info = info->ai_next) {
    Fd socket(::socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) continue;
    sockaddr_storage target{};
    std::memcpy(&target, info->ai_addr, info->ai_addrlen);
    if (is_misleading_loopback(host, info->ai_addr)) {
      if (info->ai_family == AF_INET) {
        reinterpret_cast<sockaddr_in*>(&target)->sin_addr.s_addr = htonl(INADDR_ANY);
      } else {
        reinterpret_cast<sockaddr_in6*>(&target)->sin6_addr = in6addr_any;
      }
    }
    const int yes = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&target), info->ai_addrlen) == 0 &&
        ::listen(socket.get(), SOMAXCONN) == 0) {
      return socket;
    }
  }
  return Fd();
}

Fd start_connecting(const std::string& host, int port, int attempt) {
  const Addresses all = find_addresses(host, port);
  int count = 0;
  for (const addrinfo* one = all.get(); one != nullptr; one = one->ai_next) ++count;
  const addrinfo* found = all.get();
  for (int i = 0; i < attempt % count; ++i) found = found->ai_next;
  Fd socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  const int yes = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  if (::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) {
    return Fd();
  }
  return socket;
}

}  // namespace lockstep
