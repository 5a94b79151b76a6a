#include "launch/tls.h"

#include <fcntl.h>
#include <lockstep/error.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>

#include "base/env.h"
#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::string_view kIdentity = "lockstep";

// Who answers in host 0's place sees a hash of the key and may try secrets against it for as long
// as he likes, so nothing that people think of will do: it has to be random bytes, as text.
constexpr std::size_t kSecretBytes = 32;
constexpr std::size_t kLeastSecret = 43;      // in base64, without what fills it up
constexpr std::size_t kLeastCharacters = 10;  // different ones; random texts have more

// A pre-shared key is bound to the hash of its cipher suite; this one has SHA-256.
constexpr const char* kCipher = "TLS_AES_128_GCM_SHA256";
constexpr std::array<unsigned char, 2> kCipherId = {0x13, 0x01};

[[noreturn]] void fail(const std::string& what) {
  throw SystemError({.operation = "launch"}, 0,
                    text::format("OpenSSL cannot {}: {}.\nCheck this machine's OpenSSL.", what,
                                 last_tls_error()));
}

const std::string& key_of(SSL* ssl) {
  return *static_cast<const std::string*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
}

// The session that both sides would have if they had met before: it holds the key.
SSL_SESSION* session_of(SSL* ssl) {
  SSL_SESSION* const session = SSL_SESSION_new();
  const std::string& key = key_of(ssl);
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(ssl, kCipherId.data());
  if (session == nullptr || cipher == nullptr ||
      SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()),
                                  key.size()) != 1 ||
      SSL_SESSION_set_cipher(session, cipher) != 1 ||
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(session);
    return nullptr;
  }
  return session;
}

int offer_key(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, std::size_t* size,
              SSL_SESSION** session) {
  *session = nullptr;
  if (digest != nullptr && EVP_MD_get_type(digest) != NID_sha256) return 1;  // not this key's hash
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *size = kIdentity.size();
  *session = session_of(ssl);
  return *session != nullptr ? 1 : 0;
}

int find_key(SSL* ssl, const unsigned char* identity, std::size_t size, SSL_SESSION** session) {
  const std::string_view asked(reinterpret_cast<const char*>(identity), size);
  *session = asked == kIdentity ? session_of(ssl) : nullptr;
  return 1;
}

}  // namespace

std::string last_tls_error() {
  const unsigned long code = ERR_peek_last_error();
  const char* const reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  ERR_clear_error();
  return reason != nullptr ? reason : "no reason is known";
}

Tls::Tls(std::string_view secret) : context_(SSL_CTX_new(TLS_method()), SSL_CTX_free) {
  if (!context_) fail("make a TLS context");
  // Of the right length, whatever the secret's.
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  const std::string text = "lockstep launcher 1 " + std::string(secret);
  if (EVP_Digest(text.data(), text.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
    fail("compute SHA-256");
  }
  key_.assign(reinterpret_cast<const char*>(digest.data()), size);
  SSL_CTX* const context = context_.get();
  SSL_CTX_set_app_data(context, &key_);
  SSL_CTX_set_psk_use_session_callback(context, offer_key);
  SSL_CTX_set_psk_find_session_callback(context, find_key);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_num_tickets(context, 0);
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context, kCipher) != 1) {
    fail("speak TLS 1.3");
  }
}

Tls::Session Tls::make_session(int socket, bool is_server) const {
  Session session(SSL_new(context_.get()), SSL_free);
  if (!session || SSL_set_fd(session.get(), socket) != 1) fail("make a TLS session");
  if (is_server) {
    SSL_set_accept_state(session.get());
  } else {
    // A server may leave the key aside and show a certificate instead; none is good enough.
    SSL_set_verify(session.get(), SSL_VERIFY_PEER, nullptr);
    SSL_set_connect_state(session.get());
  }
  return session;
}

std::string read_secret(const std::string& file) {
  const std::string how =
      "Make one, and copy it to all hosts: lockstep secret ~/.lockstep-secret, then --secret-file "
      "~/.lockstep-secret.";
  const auto refuse = [&](const std::string& what) {
    throw UsageError({.operation = "launch"}, what + "\n" + how);
  };
  std::string secret;
  if (file.empty()) {
    const auto variable = Environment::of_process().get("LOCKSTEP_SECRET");
    if (!variable) refuse("Several hosts need a common secret, and there is none.");
    secret = *variable;
  } else {
    const Fd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (!fd || ::fstat(fd.get(), &status) != 0) {
      refuse(text::format("The secret file {} cannot be read: {}.", file, std::strerror(errno)));
    }
    if (status.st_uid != ::geteuid()) {
      refuse(text::format("The secret file {} belongs to user {}, this is user {}: chown it.", file,
                          status.st_uid, ::geteuid()));
    }
    if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
      refuse(text::format("The secret file {} is open to other users (mode {:o}): chmod 600 {}.",
                          file, status.st_mode & 0777, file));
    }
    secret = read_small_file(text::format("/proc/self/fd/{}", fd.get()));
    while (!secret.empty() && std::isspace(static_cast<unsigned char>(secret.back())) != 0) {
      secret.pop_back();
    }
  }
  const std::set<char> characters(secret.begin(), secret.end());
  if (secret.size() < kLeastSecret || characters.size() < kLeastCharacters) {
    refuse(text::format(
        "The secret can be guessed: it has {} characters, {} different ones. It has to "
        "be {} random bytes, {} characters in base64.",
        secret.size(), characters.size(), kSecretBytes, kLeastSecret));
  }
  return secret;
}

std::string make_secret() {
  std::array<unsigned char, kSecretBytes> bytes{};
  if (RAND_bytes(bytes.data(), bytes.size()) != 1) fail("make random bytes");
  std::array<unsigned char, 4 * ((kSecretBytes + 2) / 3) + 1> text{};
  const int size = EVP_EncodeBlock(text.data(), bytes.data(), bytes.size());
  return {reinterpret_cast<const char*>(text.data()), static_cast<std::size_t>(size)};
}

void write_secret(const std::string& file) {
  const std::string line = make_secret() + "\n";
  const Fd fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!fd) {
    throw_errno(text::format("cannot make the secret file {}", file),
                "Give a new file in a folder that you may write to.");
  }
  if (::write(fd.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()) ||
      ::fsync(fd.get()) != 0) {
    throw_errno(text::format("cannot write {}", file), "Check whether the disk is full.");
  }
}

}  // namespace lockstep
