// Tls: TLS 1.3 with a secret that all launchers of a job share, instead of certificates.
//
// The secret proves each side to the other, and keys are fresh for every connection (PSK with
// ephemeral Diffie-Hellman): who learns the secret later cannot read what was recorded.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

class Tls {
 public:
  using Session = std::unique_ptr<SSL, decltype(&SSL_free)>;

  explicit Tls(std::string_view secret);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // For a connected, non-blocking socket, which stays the caller's.
  Session make_session(int socket, bool is_server) const;

 private:
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  std::string key_;  // context_'s callbacks read it
};

// What OpenSSL says went wrong last, in words; forgets it.
std::string last_tls_error();

// From a file that only this user can read, or, if `file` is empty, from LOCKSTEP_SECRET.
// Throws: UsageError if there is none, it could be guessed, or others can read the file.
std::string read_secret(const std::string& file);

// 32 random bytes, as text.
std::string make_secret();
// A new file with such a secret. Throws: SystemError; what is there already stays as it is.
void write_secret(const std::string& file);

}  // namespace lockstep
