// A fuzz target for what arrives at a launcher (libFuzzer): frames of CBOR from a rank or another
// host, which are answered by the store or read as parts of the launchers' protocol. Whatever
// comes, it is answered or the connection is lost.

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "launch/connection.h"
#include "launch/hello.h"
#include "launch/job.h"
#include "launch/key_value.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;  // NOLINT: a program
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    std::abort();
  }
  Fd sender(ends[0]);
  EventLoop loop;
  KeyValue store;
  const auto connection =
      Connection::make(loop, Fd(ends[1]), nullptr, true,
                       {.received =
                            [&](const Json& message) {
                              static_cast<void>(store.answer(message));
                              if (message.contains("cause")) {
                                static_cast<void>(message.at("cause").get<StopCause>());
                              }
                              if (message.contains("generation")) {
                                static_cast<void>(message.at("generation").get<Generation>());
                              }
                              if (message.contains("program_hash")) {
                                const auto hello = message.get<Hello>();
                                static_cast<void>(find_conflict({}, hello, false));
                                static_cast<void>(compare_arguments({}, hello));
                              }
                            },
                        .closed = [](const std::string&) {}});
  if (::send(sender.get(), data, size, MSG_NOSIGNAL) != static_cast<ssize_t>(size)) std::abort();
  sender.reset();
  for (int i = 0; i < 4 && connection->is_open(); ++i) loop.run_once(std::chrono::milliseconds(0));
  if (connection->is_open()) std::abort();  // the other end has closed
  return 0;
}
