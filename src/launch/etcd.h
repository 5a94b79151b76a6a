// Etcd: the few calls of etcd's v3 API that an election needs, as JSON over HTTP.
//
// etcd serves them at its client port under /v3 (the gRPC gateway, etcd 3.4 or newer). A call
// blocks, for a limited time: do not call from the loop's thread. It goes to the endpoint that
// answered last and, if that fails, to the next one; so a call may run twice, and each can be
// repeated safely. Threading: safe from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace lockstep {

class Etcd {
 public:
  struct Endpoint {
    std::string host;
    int port = 2379;
    std::string text() const;  // "host:port", "[::1]:port"
  };
  // A key's value, and what etcd knows about it.
  struct Entry {
    std::string value;
    std::int64_t create_revision = 0;  // grows with every change of any key
    std::int64_t lease = 0;            // 0: none
  };

  // `url`: "etcd://HOST:PORT[,HOST:PORT...]", or "etcds://..." for TLS, which trusts the system's
  // certificate authorities, or those of SSL_CERT_FILE. `timeout`: to connect to one endpoint, and
  // again to get its answer. Throws: UsageError.
  Etcd(const std::string& url, std::chrono::milliseconds timeout);

  // All of these throw SystemError if no endpoint answers, and Json::exception if it is not etcd
  // that answers.

  // A new lease: etcd deletes its keys when nobody has kept it alive for `ttl`.
  std::int64_t grant_lease(std::chrono::seconds ttl) const;
  // How long the lease lives from now on; 0 if it has ended.
  std::chrono::seconds keep_alive(std::int64_t lease) const;
  // Deletes the lease and its keys; does nothing if it has ended.
  void revoke(std::int64_t lease) const;
  std::optional<Entry> get(const std::string& key) const;
  // Puts the value if the key does not exist. Returns the entry that exists then.
  Entry put_if_absent(const std::string& key, const std::string& value, std::int64_t lease) const;

  const std::vector<Endpoint>& endpoints() const { return endpoints_; }

 private:
  // The answer, or nothing if etcd says that what was named does not exist.
  std::optional<Json> call(const char* path, const Json& request) const;
  struct Answer;
  Answer post(const Endpoint& endpoint, const char* path, const std::string& body) const;

  std::vector<Endpoint> endpoints_;
  bool has_tls_ = false;
  const std::chrono::milliseconds timeout_;
  mutable std::atomic<std::size_t> preferred_ = 0;  // the endpoint that answered last
};

}  // namespace lockstep
