// Connection: messages to and from a launcher of another host (TLS), or a rank of this one.
//
// A message is a JSON value as CBOR, behind its length in 4 bytes, the highest first. Nothing here
// waits; what cannot be sent yet is kept. Callbacks may close and let go of the connection.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/json.h"
#include "base/posix.h"
#include "launch/event_loop.h"
#include "launch/tls.h"

namespace lockstep {

// How the reason begins if the two sides could not prove themselves to each other.
inline constexpr const char* kHandshakeFailed = "the handshake failed";

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  struct Callbacks {
    std::function<void()> opened = [] {};  // the other side has proved that it knows the secret
    std::function<void(const Json&)> received;
    std::function<void(const std::string& reason)> closed;  // not after close()
  };

  // `tls` is null for a rank's, which needs no proof.
  static std::shared_ptr<Connection> make(EventLoop& loop, Fd socket, const Tls* tls,
                                          bool is_server, Callbacks callbacks);
  ~Connection() { close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(const Json& message);
  void close();
  // The same, with a last message, if that can leave at once.
  void close(const Json& last_message);
  bool is_open() const { return static_cast<bool>(socket_); }
  bool is_answered() const;    // somebody is at the other end, whoever it is
  bool has_shown_key() const;  // to a server: it may still be one who repeats what he has heard
  bool is_ready() const { return is_ready_; }  // the handshake is finished
  bool is_sent() const { return unsent_.empty(); }
  EventLoop::Clock::time_point last_heard() const { return last_heard_; }

 private:
  static constexpr std::size_t kLongest = 64 << 20;  // bytes of a message

  Connection(EventLoop& loop, Fd socket, Callbacks callbacks)
      : loop_(loop), socket_(std::move(socket)), callbacks_(std::move(callbacks)) {}

  void watch(int events);
  void work();
  bool shake_hands();
  bool write_some();
  bool read_some();
  bool take_messages();
  bool is_to_wait(int result, const char* doing);
  void lose(const std::string& reason);

  EventLoop& loop_;
  Fd socket_;
  Tls::Session session_{nullptr, SSL_free};
  Callbacks callbacks_;
  bool is_ready_ = false;  // hands are shaken
  short wanted_ = POLLIN;  // what the last operation waits for
  std::string received_;
  std::string unsent_;
  std::size_t num_sent_ = 0;  // bytes of it that are gone
  EventLoop::Clock::time_point last_heard_ = EventLoop::Clock::now();
};

}  // namespace lockstep
