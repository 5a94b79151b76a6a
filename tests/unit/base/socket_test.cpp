#include "base/socket.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

namespace lockstep {
namespace {

std::string bound_to(const Fd& socket) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return "none";
  char text[INET_ADDRSTRLEN] = {};
  return ::inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
}

// Other ways to write, and other names of, the loopback are meant: nothing else may be bound.
TEST(Socket, AnotherNameOfTheLoopbackBindsTheLoopback) {
  EXPECT_EQ(bound_to(listen_at("127.0.0.1", 0)), "127.0.0.1");
  EXPECT_EQ(bound_to(listen_at("127.1", 0)), "127.0.0.1");
  EXPECT_EQ(bound_to(listen_at("0x7f000001", 0)), "127.0.0.1");
}

}  // namespace
}  // namespace lockstep
