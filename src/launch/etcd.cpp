#include "launch/etcd.h"

#include <httplib.h>
#include <lockstep/error.h>
#include <openssl/evp.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/posix.h"
#include "base/printable.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kLongestAnswer = 1 << 20;  // bytes; an election's have a few hundred
constexpr int kNotFound = 5;                     // gRPC's code

std::string to_base64(const std::string& bytes) {
  std::string text(4 * ((bytes.size() + 2) / 3) + 1, '\0');  // and the 0 that OpenSSL writes
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                                   reinterpret_cast<const unsigned char*>(bytes.data()),
                                   static_cast<int>(bytes.size()));
  text.resize(static_cast<std::size_t>(size));
  return text;
}

std::string from_base64(const std::string& text) {
  std::string bytes(text.size(), '\0');
  const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()),
                                   static_cast<int>(text.size()));
  if (size < 0) return {};
  // OpenSSL counts what fills the last group up.
  const auto padding = text.size() - std::min(text.size(), text.find_last_not_of('=') + 1);
  bytes.resize(static_cast<std::size_t>(size) - std::min<std::size_t>(padding, 2));
  return bytes;
}

// The gateway writes 64-bit integers as strings, and leaves out those that are 0.
std::int64_t integer(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) return 0;
  if (!found->is_string()) return found->get<std::int64_t>();
  const auto& text = found->get_ref<const std::string&>();
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  if (read.ec != std::errc() || read.ptr != end) {
    throw Json::other_error::create(500, text::format("{} is no integer", name), &object);
  }
  return value;
}

std::optional<Etcd::Entry> first_entry(const Json& range) {
  const auto entries = range.find("kvs");
  if (entries == range.end() || entries->empty()) return std::nullopt;
  const Json& entry = entries->at(0);
  return Etcd::Entry{.value = from_base64(entry.value("value", "")),
                     .create_revision = integer(entry, "create_revision"),
                     .lease = integer(entry, "lease")};
}

[[noreturn]] void refuse_url(const std::string& url, const std::string& why) {
  throw UsageError(
      {.operation = "launch"},
      text::format("Invalid address of etcd '{}': {}.\nGive etcd://HOST:PORT, or "
                   "etcds://HOST:PORT for TLS; several endpoints as HOST:PORT,HOST:PORT.",
                   printable(url), why));
}

Etcd::Endpoint parse_endpoint(const std::string& url, const std::string& text) {
  Etcd::Endpoint endpoint;
  std::string port;
  bool has_port = false;
  if (text.starts_with('[')) {
    const auto end = text.find(']');
    if (end == std::string::npos) refuse_url(url, "']' is missing");
    endpoint.host = text.substr(1, end - 1);
    port = text.substr(end + 1);
    has_port = !port.empty();
    if (has_port && port[0] != ':') refuse_url(url, "after ']' only :PORT may follow");
    if (has_port) port.erase(0, 1);
  } else {
    const auto colon = text.find(':');
    endpoint.host = text.substr(0, colon);
    has_port = colon != std::string::npos;
    if (has_port) port = text.substr(colon + 1);
  }
  if (endpoint.host.empty()) refuse_url(url, "a host is missing");
  if (endpoint.host.find_first_of("/@?# \t\r\n[]") != std::string::npos) {
    refuse_url(url, text::format("'{}' is no host; user names and paths are not supported",
                                 printable(endpoint.host)));
  }
  if (has_port) {
    const char* const end = port.data() + port.size();
    const auto read = std::from_chars(port.data(), end, endpoint.port);
    if (read.ec != std::errc() || read.ptr != end || endpoint.port < 1 || endpoint.port > 65535) {
      refuse_url(url, text::format("'{}' is no port", printable(port)));
    }
  }
  return endpoint;
}

}  // namespace

std::string Etcd::Endpoint::text() const {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return text::format("{}{}{}:{}", is_ipv6 ? "[" : "", host, is_ipv6 ? "]" : "", port);
}

Etcd::Etcd(const std::string& url, std::chrono::milliseconds timeout) : timeout_(timeout) {
  const auto colon = url.find("://");
  const std::string scheme = colon == std::string::npos ? "" : url.substr(0, colon);
  has_tls_ = scheme == "etcds";
  if (!has_tls_ && scheme != "etcd") refuse_url(url, "it does not begin with etcd:// or etcds://");
  std::string rest = url.substr(colon + 3);
  while (true) {
    const auto comma = rest.find(',');
    endpoints_.push_back(parse_endpoint(url, rest.substr(0, comma)));
    if (comma == std::string::npos) break;
    rest.erase(0, comma + 1);
  }
}

std::int64_t Etcd::grant_lease(std::chrono::seconds ttl) const {
  const auto answer = call("/v3/lease/grant", {{"TTL", ttl.count()}});
  return integer(answer.value(), "ID");
}

std::chrono::seconds Etcd::keep_alive(std::int64_t lease) const {
  const auto answer = call("/v3/lease/keepalive", {{"ID", std::to_string(lease)}});
  // A stream's element. Of a lease that has ended, it has no time to live.
  if (!answer) return std::chrono::seconds(0);
  return std::chrono::seconds(integer(answer->value("result", Json::object()), "TTL"));
}

void Etcd::revoke(std::int64_t lease) const {
  call("/v3/lease/revoke", {{"ID", std::to_string(lease)}});
}

std::optional<Etcd::Entry> Etcd::get(const std::string& key) const {
  const auto answer = call("/v3/kv/range", {{"key", to_base64(key)}});
  return answer ? first_entry(*answer) : std::nullopt;
}

Etcd::Entry Etcd::put_if_absent(const std::string& key, const std::string& value,
                                std::int64_t lease) const {
  const std::string name = to_base64(key);
  const Json put = {{"key", name}, {"value", to_base64(value)}, {"lease", std::to_string(lease)}};
  const auto answer = call(
      "/v3/kv/txn", {{"compare", {{{"key", name}, {"target", "CREATE"}, {"create_revision", "0"}}}},
                     {"success", {{{"request_put", put}}}},
                     {"failure", {{{"request_range", {{"key", name}}}}}}});
  if (!answer) {
    throw SystemError(
        {.operation = "launch"}, 0,
        "etcd ended the lease before it was used.\nCheck whether this host or etcd is "
        "overloaded.");
  }
  if (answer->value("succeeded", false)) {
    return {.value = value,
            .create_revision = integer(answer->at("header"), "revision"),
            .lease = lease};
  }
  return first_entry(answer->at("responses").at(0).at("response_range")).value();
}

struct Etcd::Answer {
  Json json = nullptr;
  std::string problem = {};  // empty: the answer can be used
};

std::optional<Json> Etcd::call(const char* path, const Json& request) const {
  const NoSigpipe no_sigpipe;  // httplib writes to connections that may be closed
  const std::string body = request.dump();
  const std::size_t first = preferred_;
  std::vector<std::string> problems;
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    const std::size_t index = (first + i) % endpoints_.size();
    const Answer answer = post(endpoints_[index], path, body);
    if (answer.problem.empty()) {
      preferred_ = index;
      if (answer.json.value("code", 0) == kNotFound) return std::nullopt;
      return answer.json;
    }
    problems.push_back(text::format("{}: {}", endpoints_[index].text(), answer.problem));
  }
  throw SystemError(
      {.operation = "launch"}, 0,
      text::format("etcd does not answer {} at {}.\nCheck that etcd runs there and that "
                   "this host can reach it.",
                   path, text::join(problems, "; ")));
}

Etcd::Answer Etcd::post(const Endpoint& endpoint, const char* path, const std::string& body) const {
  std::unique_ptr<httplib::ClientImpl> client;
  if (has_tls_) {
    client = std::make_unique<httplib::SSLClient>(endpoint.host, endpoint.port);
  } else {
    client = std::make_unique<httplib::ClientImpl>(endpoint.host, endpoint.port);
  }
  client->set_connection_timeout(timeout_);
  client->set_read_timeout(timeout_);
  client->set_write_timeout(timeout_);

  httplib::Request request;
  request.method = "POST";
  request.path = path;
  request.body = body;
  request.set_header("Host", endpoint.text());  // httplib forgets the brackets of IPv6
  request.set_header("Content-Type", "application/json");
  // The answer is collected here because of a defect of httplib 0.11: it takes the trailer with
  // which the gateway ends an error for a failure to read, and drops what it has read.
  int status = 0;
  std::string received;
  const auto start = std::chrono::steady_clock::now();
  request.response_handler = [&](const httplib::Response& response) {
    status = response.status;
    return true;
  };
  request.content_receiver = [&](const char* data, std::size_t size, std::uint64_t, std::uint64_t) {
    received.append(data, size);
    return received.size() <= kLongestAnswer &&
           std::chrono::steady_clock::now() - start < 3 * timeout_;
  };
  const httplib::Result result = client->send(request);

  const auto elapsed = std::chrono::steady_clock::now() - start;
  const bool has_broken =
      result.error() == httplib::Error::Read || result.error() == httplib::Error::Write;
  const double seconds = std::chrono::duration<double>(timeout_).count();
  Answer answer{.json = Json::parse(received, nullptr, false)};
  const bool is_whole = answer.json.is_object();
  if (status == 200 && is_whole && !answer.json.contains("error")) return answer;
  if (is_whole) {
    if (answer.json.value("code", Json()) == kNotFound) return answer;
    const Json& error = answer.json.contains("message")
                            ? answer.json
                            : answer.json.value("error", Json::object());  // in a stream
    answer.problem = text::format(
        "status {}, {}", status,
        printable(error.is_object() ? error.value("message", "no reason") : error.dump()));
  } else if (status != 0) {
    answer.problem = text::format("status {}, and no JSON: no etcd 3.4 or newer", status);
  } else if (result.error() == httplib::Error::ConnectionTimeout) {
    answer.problem = text::format("no connection within {:.1f} s", seconds);
  } else if (result.error() == httplib::Error::Connection) {
    answer.problem = "cannot connect";
  } else if (has_broken && elapsed < timeout_) {
    answer.problem = "the connection was closed without an answer";
    if (!has_tls_) answer.problem += " (an etcd that requires TLS needs etcds://)";
  } else if (has_broken) {
    answer.problem = text::format("connected, but no answer within {:.1f} s", seconds);
  } else if (result.error() == httplib::Error::SSLServerVerification) {
    answer.problem = "its certificate is not trusted (SSL_CERT_FILE names certificate authorities)";
  } else {
    answer.problem = text::format("HTTP error '{}'", httplib::to_string(result.error()));
  }
  return answer;
}

}  // namespace lockstep
