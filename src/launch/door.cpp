#include "launch/door.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <tuple>

#include "base/socket.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostNewcomers = 64;  // at a time
constexpr int kRefusalsShown = 10;
constexpr auto kPauseWithoutDescriptors = std::chrono::seconds(1);

std::string address_text(const sockaddr_storage& address, socklen_t size, bool has_port) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host.data(), host.size(),
                port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  return has_port ? text::format("{}:{}", host.data(), port.data()) : host.data();
}

// What one machine can choose its addresses from: with IPv6, all that begin with the same 64 bits.
std::string network_of(sockaddr_storage address, socklen_t size) {
  if (address.ss_family == AF_INET6) {
    in6_addr& its = reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr;
    if (!IN6_IS_ADDR_V4MAPPED(&its)) std::fill(its.s6_addr + 8, its.s6_addr + 16, 0);
  }
  return address_text(address, size, false);
}

}  // namespace

Door::Door(EventLoop& loop, Output& output, const RunOptions& options, Callbacks callbacks)
    : loop_(loop),
      output_(output),
      callbacks_(std::move(callbacks)),
      tls_(read_secret(options.secret_file)),
      listener_(listen_at(options.master_host, options.master_port)) {
  if (!listener_) {
    throw_errno(text::format("cannot listen at {}:{}", options.master_host, options.master_port),
                options.coordinator.empty()
                    ? "Give --master a free port and an address of this host, the first one."
                    : "Give --master a free port and an address of this host.");
  }
  watch_listener();
}

Door::~Door() {
  loop_.forget(listener_.get());
  for (const auto& [_, newcomer] : newcomers_) loop_.cancel(newcomer.deadline);
}

void Door::watch_listener() {
  loop_.watch(listener_.get(), POLLIN, [this](short) { accept_one(); });
}

void Door::accept_one() {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  Fd socket(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &size,
                      SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (errno != EMFILE && errno != ENFILE) return;  // gone again
    // Until descriptors are free, asking again at once would only cost time.
    loop_.forget(listener_.get());
    loop_.after(kPauseWithoutDescriptors, [this] { watch_listener(); });
    return;
  }
  if (newcomers_.size() >= kMostNewcomers) make_room();
  const std::string address = address_text(from, size, true);
  const int number = num_newcomers_++;
  // The callbacks belong to the connection: they must not keep it alive.
  auto self = std::make_shared<std::weak_ptr<Connection>>();
  auto connection = Connection::make(loop_, std::move(socket), &tls_, true,
                                     {.received =
                                          [this, self, number](const Json& message) {
                                            const auto mine = self->lock();
                                            forget(number);
                                            callbacks_.received(mine, message);
                                          },
                                      .closed =
                                          [this, self, number, address](const std::string& reason) {
                                            const auto mine = self->lock();
                                            if (forget(number)) return refuse(address, reason);
                                            callbacks_.closed(mine, reason);
                                          }});
  *self = connection;
  const auto deadline = loop_.after(kProofDeadline, [this, number, address] {
    if (forget(number)) refuse(address, "it did not prove itself in time");
  });
  newcomers_.emplace(number, Newcomer{std::move(connection), deadline, network_of(from, size)});
}

// False if it is no newcomer any more.
bool Door::forget(int number) {
  const auto found = newcomers_.find(number);
  if (found == newcomers_.end()) return false;
  loop_.cancel(found->second.deadline);
  newcomers_.erase(found);
  return true;
}

// One has to go. A flood pushes out its own connections, not a host's: one goes from where most
// come from. Of these the oldest that has not shown the key, which is no proof: who has heard a
// greeting can repeat it.
void Door::make_room() {
  std::map<std::string, int> counts;
  for (const auto& [_, one] : newcomers_) ++counts[one.network];
  const auto who = std::ranges::min_element(newcomers_, {}, [&](const auto& entry) {
    const auto& [number, one] = entry;
    return std::tuple(-counts[one.network], one.connection->has_shown_key(), number);
  });
  forget(who->first);
  refuse("one of many connections", "too many at a time");
}

void Door::refuse(const std::string& who, const std::string& reason) {
  ++num_refused_;
  if (num_refused_ > kRefusalsShown) return;
  output_.say(text::format("refused {}: {}{}", who, reason,
                           num_refused_ == kRefusalsShown ? " (no more of these are shown)" : ""));
}

}  // namespace lockstep
