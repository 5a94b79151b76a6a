#include "world/launcher_store.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/error.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/frame.h"
#include "base/text.h"
#include "world/store.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// The launcher answers at once, or is gone; only a lost host makes this long.
constexpr auto kAnswerDeadline = std::chrono::seconds(60);

void wait_for(int socket, short events, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd one{socket, events, 0};
  if (left <= 0 || ::poll(&one, 1, static_cast<int>(left)) == 0) {
    C10_THROW_ERROR(DistStoreError, "the launcher has not answered in 60 s");
  }
}

void send_all(int socket, const std::string& bytes, Clock::time_point deadline) {
  for (std::size_t at = 0; at < bytes.size();) {
    wait_for(socket, POLLOUT, deadline);
    const ssize_t count =
        ::send(socket, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno != EINTR && errno != EAGAIN) {
      C10_THROW_ERROR(DistStoreError, "the launcher is gone");
    }
    if (count > 0) at += static_cast<std::size_t>(count);
  }
}

std::string receive(int socket, std::size_t size, Clock::time_point deadline) {
  std::string bytes(size, '\0');
  for (std::size_t at = 0; at < size;) {
    wait_for(socket, POLLIN, deadline);
    const ssize_t count = ::recv(socket, bytes.data() + at, size - at, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EINTR && errno != EAGAIN)) {
      C10_THROW_ERROR(DistStoreError, "the launcher is gone");
    }
    if (count > 0) at += static_cast<std::size_t>(count);
  }
  return bytes;
}

}  // namespace

LauncherStore::LauncherStore(Fd socket, std::chrono::milliseconds timeout)
    : Store(timeout), line_(std::make_shared<Line>()) {
  line_->socket = std::move(socket);
}

LauncherStore::LauncherStore(std::shared_ptr<Line> line, std::chrono::milliseconds timeout)
    : Store(timeout), line_(std::move(line)) {}

c10::intrusive_ptr<c10d::Store> LauncherStore::clone() {
  return c10::intrusive_ptr<LauncherStore>::unsafe_steal_from_new(
      new LauncherStore(line_, timeout_));
}

Json LauncherStore::ask(const Json& question) {
  const std::string frame = to_frame(Json::to_cbor(question));
  const MutexLock lock(line_->mutex);
  const int socket = line_->socket.get();
  if (socket < 0) C10_THROW_ERROR(DistStoreError, "the launcher did not answer before");
  const auto deadline = Clock::now() + kAnswerDeadline;
  // After a failure a late answer would be taken for that to the next question.
  auto give_up =
      c10::make_scope_exit([&]() LOCKSTEP_REQUIRES(line_->mutex) { line_->socket.reset(); });
  send_all(socket, frame, deadline);
  const std::size_t size = frame_size(receive(socket, kFrameHead, deadline));
  Json answer = Json::from_cbor(receive(socket, size, deadline));
  give_up.release();
  if (answer.is_object() && answer.contains("revoked")) {
    throw PeerLostError({.operation = "store"},
                        text::format("This generation of the job has ended: {}.\nAn elastic job "
                                     "goes on in the next one.",
                                     answer.at("revoked").get<std::string>()));
  }
  if (answer.is_object()) C10_THROW_ERROR(DistStoreError, answer.at("error").get<std::string>());
  return answer;
}

void LauncherStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask({{"op", "set"}, {"key", key}, {"value", Json::binary(value)}});
}

std::vector<std::uint8_t> LauncherStore::compareSet(const std::string& key,
                                                    const std::vector<std::uint8_t>& expected,
                                                    const std::vector<std::uint8_t>& value) {
  return ask({{"op", "compare_set"},
              {"key", key},
              {"expected", Json::binary(expected)},
              {"value", Json::binary(value)}})
      .get_binary();
}

std::vector<std::uint8_t> LauncherStore::get(const std::string& key) {
  wait({key}, timeout_);
  const Json answer = ask({{"op", "get"}, {"key", key}});
  if (answer.is_null()) C10_THROW_ERROR(DistStoreError, "the key " + key + " was deleted");
  return answer.get_binary();
}

std::int64_t LauncherStore::add(const std::string& key, std::int64_t value) {
  return ask({{"op", "add"}, {"key", key}, {"value", value}});
}

bool LauncherStore::deleteKey(const std::string& key) {
  return ask({{"op", "delete"}, {"key", key}});
}

bool LauncherStore::check(const std::vector<std::string>& keys) {
  return ask({{"op", "check"}, {"keys", keys}});
}

std::int64_t LauncherStore::getNumKeys() { return ask({{"op", "count"}}); }

void LauncherStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void LauncherStore::wait(const std::vector<std::string>& keys,
                         const std::chrono::milliseconds& timeout) {
  const auto began = Clock::now();
  while (!check(keys)) {
    const auto waited = Clock::now() - began;
    if (timeout != kNoTimeout && waited >= timeout) {
      C10_THROW_ERROR(DistStoreError, text::format("wait timeout after {} ms, keys: {}",
                                                   timeout.count(), text::join(keys, ", ")));
    }
    std::this_thread::sleep_for(pause_after(waited));
  }
}

void LauncherStore::append(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask({{"op", "append"}, {"key", key}, {"value", Json::binary(value)}});
}

std::vector<std::vector<std::uint8_t>> LauncherStore::multiGet(
    const std::vector<std::string>& keys) {
  std::vector<std::vector<std::uint8_t>> values;
  for (const std::string& key : keys) values.push_back(get(key));
  return values;
}

void LauncherStore::multiSet(const std::vector<std::string>& keys,
                             const std::vector<std::vector<std::uint8_t>>& values) {
  for (std::size_t i = 0; i < keys.size(); ++i) set(keys[i], values.at(i));
}

std::vector<std::string> LauncherStore::listKeys() { return ask({{"op", "list"}}); }

}  // namespace lockstep
