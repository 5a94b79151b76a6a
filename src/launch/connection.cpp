#include "launch/connection.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/frame.h"
#include "base/text.h"
#include "launch/cbor.h"

namespace lockstep {

std::shared_ptr<Connection> Connection::make(EventLoop& loop, Fd socket, const Tls* tls,
                                             bool is_server, Callbacks callbacks) {
  const int fd = socket.get();
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  std::shared_ptr<Connection> connection(
      new Connection(loop, std::move(socket), std::move(callbacks)));
  if (tls != nullptr) {
    connection->session_ = tls->make_session(fd, is_server);
  } else {
    connection->is_ready_ = true;
  }
  // A client speaks first; the callback for writing does so.
  connection->watch(POLLIN | POLLOUT);
  return connection;
}

void Connection::watch(int events) {
  loop_.watch(socket_.get(), static_cast<short>(events), [weak = weak_from_this()](short) {
    if (const auto self = weak.lock()) self->work();
  });
}

void Connection::send(const Json& message) {
  if (!is_open()) return;
  unsent_ += to_frame(Json::to_cbor(message));
  watch(POLLIN | POLLOUT);
}

void Connection::close() {
  if (!is_open()) return;
  loop_.forget(socket_.get());
  if (session_ && is_ready_) SSL_shutdown(session_.get());
  ERR_clear_error();
  session_.reset();
  socket_.reset();
}

void Connection::close(const Json& last_message) {
  if (!is_open()) return;
  callbacks_.closed = [](const std::string&) {};
  send(last_message);
  if (is_ready_) write_some();
  close();
}

bool Connection::is_answered() const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  return is_open() &&
         ::getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0;
}

bool Connection::has_shown_key() const {
  return session_ && SSL_session_reused(session_.get()) == 1;
}

void Connection::lose(const std::string& reason) {
  close();
  callbacks_.closed(reason);
}

void Connection::work() {
  const auto self = shared_from_this();  // a callback may let go of it
  wanted_ = POLLIN;
  if (!is_ready_ && !shake_hands()) {
    if (!is_open()) return;
  } else {
    if (!read_some() || !write_some()) return;
  }
  if (!is_open()) return;
  const bool has_more = is_ready_ && !unsent_.empty();
  watch(wanted_ | (has_more ? POLLOUT : 0));
}

// True if the operation is to be tried again later; else the connection is lost.
bool Connection::is_to_wait(int result, const char* doing) {
  if (!session_) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return true;
    lose(result == 0 ? "it closed the connection" : std::strerror(errno));
    return false;
  }
  const int saved = errno;
  const int code = SSL_get_error(session_.get(), result);
  if (code == SSL_ERROR_WANT_READ) return true;
  if (code == SSL_ERROR_WANT_WRITE) {
    wanted_ = static_cast<short>(wanted_ | POLLOUT);
    return true;
  }
  std::string reason = "it closed the connection";
  if (code == SSL_ERROR_SSL) {
    reason = text::format("{}: {}", doing, last_tls_error());
  } else if (code == SSL_ERROR_SYSCALL && saved != 0) {
    reason = std::strerror(saved);
  }
  ERR_clear_error();
  is_ready_ = false;  // after a failure nothing may be sent, not even a last message
  lose(reason);
  return false;
}

bool Connection::shake_hands() {
  errno = 0;
  const int result = SSL_do_handshake(session_.get());
  if (result != 1) {
    is_to_wait(result, kHandshakeFailed);
    return false;
  }
  if (SSL_session_reused(session_.get()) != 1) {  // what OpenSSL calls the use of a shared key
    lose(text::format("{}: the secret was not used", kHandshakeFailed));
    return false;
  }
  is_ready_ = true;
  last_heard_ = EventLoop::Clock::now();
  callbacks_.opened();
  return is_open();
}

bool Connection::write_some() {
  while (num_sent_ < unsent_.size()) {
    errno = 0;
    const char* const data = unsent_.data() + num_sent_;
    const int size = static_cast<int>(std::min<std::size_t>(unsent_.size() - num_sent_, 1 << 20));
    const int count = session_
                          ? SSL_write(session_.get(), data, size)
                          : static_cast<int>(::send(socket_.get(), data,
                                                    static_cast<std::size_t>(size), MSG_NOSIGNAL));
    if (count <= 0) return is_to_wait(count, "writing failed");
    num_sent_ += static_cast<std::size_t>(count);
  }
  unsent_.clear();
  num_sent_ = 0;
  return true;
}

bool Connection::read_some() {
  std::array<char, 64 << 10> buffer;
  while (true) {
    errno = 0;
    const int count = session_
                          ? SSL_read(session_.get(), buffer.data(), buffer.size())
                          : static_cast<int>(::read(socket_.get(), buffer.data(), buffer.size()));
    if (count <= 0) return is_to_wait(count, "reading failed");
    last_heard_ = EventLoop::Clock::now();
    received_.append(buffer.data(), static_cast<std::size_t>(count));
    if (!take_messages()) return false;
  }
}

bool Connection::take_messages() {
  std::size_t at = 0;
  while (received_.size() - at >= kFrameHead) {
    const std::size_t size = frame_size(std::string_view(received_).substr(at));
    if (size > kLongest) {
      lose(text::format("it sent a message of {} bytes", size));
      return false;
    }
    if (received_.size() - at - kFrameHead < size) break;
    const auto* const body =
        reinterpret_cast<const std::uint8_t*>(received_.data()) + at + kFrameHead;
    at += kFrameHead + size;
    if (!is_plain_cbor(body, size)) {
      lose("it sent what is no message");
      return false;
    }
    try {
      callbacks_.received(Json::from_cbor(body, body + size));
    } catch (const Json::exception& error) {
      lose(text::format("it sent what is no message: {}", error.what()));
    }
    if (!is_open()) return false;
  }
  received_.erase(0, at);
  return true;
}

}  // namespace lockstep
