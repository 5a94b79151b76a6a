// Elections against a real etcd, which each test starts on loopback and ends by its pid.

#include "launch/election.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "base/process.h"
#include "base/socket.h"
#include "base/text.h"
#include "launch/etcd.h"
#include "support/error_of.h"
#include "support/etcd_server.h"
#include "support/has.h"
#include "support/temp_folder.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = EventLoop::Clock;
using test::EtcdServer;
using test::has;
using test::is_etcd_installed;
using test::port_of;

constexpr seconds kTtl{2};
constexpr seconds kShortTtl{1};  // where it does not matter if a slow machine loses it
constexpr seconds kPatience{10};
const std::string kKey = "/lockstep/job/coordinator";

// A launcher: what its election has told it.
struct Candidate {
  Candidate(EventLoop& loop, const std::string& url, const std::string& name, seconds ttl) {
    election = std::make_unique<Election>(
        loop, url, "job", ElectedLeader{.address = name + ".example", .port = 29400, .host = name},
        ttl,
        Election::Callbacks{
            .elected = [this](const ElectedLeader& one) { elected.push_back(one); },
            .lost = [this](const std::string& why) { lost.push_back(why); },
            .unreachable = [this](const std::string& why) { outages.push_back(why); }});
  }
  bool is_held() const { return election && election->is_held(); }
  std::int64_t term() const { return elected.empty() ? 0 : elected.back().term; }

  std::vector<ElectedLeader> elected;
  std::vector<std::string> lost;
  std::vector<std::string> outages;
  std::unique_ptr<Election> election;
};

class ElectionTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_etcd_installed()) {
      // CI installs it: there, nothing is left out.
      if (std::getenv("CI") != nullptr) FAIL() << "etcd is not installed";
      GTEST_SKIP() << "etcd is not installed: apt-get install etcd-server";
    }
  }

  // Whatever happens: never two leaders.
  template <typename IsReached>
  bool run_until(IsReached is_reached, milliseconds limit = kPatience) {
    const auto end = Clock::now() + limit;
    while (!is_reached() && Clock::now() < end) {
      loop_.run_once(milliseconds(5));
      int num_leaders = 0;
      for (const auto& one : candidates_) num_leaders += one->is_held() ? 1 : 0;
      if (num_leaders > 1) {
        ADD_FAILURE() << num_leaders << " leaders";
        return false;
      }
    }
    return is_reached();
  }
  void run_for(milliseconds time) {
    run_until([] { return false; }, time);
  }

  Candidate& add(const std::string& name, seconds ttl, const std::string& url, EventLoop& loop) {
    candidates_.push_back(std::make_unique<Candidate>(loop, url, name, ttl));
    return *candidates_.back();
  }
  Candidate& add(const std::string& name, seconds ttl = kTtl) {
    return add(name, ttl, server_.url(), loop_);
  }

  EtcdServer server_;
  EventLoop loop_;
  EventLoop other_loop_;  // of a launcher that can be suspended
  std::vector<std::unique_ptr<Candidate>> candidates_;
};

TEST_F(ElectionTest, OneOfTwoWinsAndTheOtherTakesOver) {
  server_.start_and_wait();
  Candidate& a = add("a");
  Candidate& b = add("b");
  ASSERT_TRUE(run_until([&] { return a.term() != 0 && b.term() != 0; }));
  run_for(kTtl + milliseconds(500));  // longer than a lease that nobody keeps alive
  Candidate& leader = a.is_held() ? a : b;
  Candidate& other = a.is_held() ? b : a;
  EXPECT_TRUE(leader.is_held());
  ASSERT_EQ(leader.elected.size(), 1U);
  ASSERT_EQ(other.elected.size(), 1U);
  EXPECT_TRUE(leader.elected[0].is_self);
  EXPECT_FALSE(other.elected[0].is_self);
  EXPECT_EQ(other.elected[0].term, leader.term());
  EXPECT_EQ(other.elected[0].host, leader.elected[0].host);
  EXPECT_EQ(other.elected[0].address, leader.elected[0].host + ".example");
  EXPECT_EQ(other.elected[0].port, 29400);

  // Both ways to go, and the others follow sooner than the lease would end.
  const std::int64_t term = leader.term();
  bool is_done = false;
  leader.election->resign([&] { is_done = true; });
  EXPECT_FALSE(leader.is_held());
  ASSERT_TRUE(run_until([&] { return is_done && other.is_held(); }, milliseconds(1500)));
  EXPECT_GT(other.term(), term);
  Candidate& third = add("c");
  ASSERT_TRUE(run_until([&] { return third.term() == other.term(); }));
  EXPECT_FALSE(third.is_held());
  other.election.reset();
  ASSERT_TRUE(run_until([&] { return third.is_held(); }, milliseconds(1500)));
  EXPECT_GT(third.term(), other.term());
  for (const auto& one : candidates_) EXPECT_TRUE(one->lost.empty() && one->outages.empty());
  EXPECT_EQ(leader.elected.size(), 1U);  // it has resigned, and is told nothing
}

TEST_F(ElectionTest, TheEndOfACandidacyLeavesNoKeyAndDoesNotWait) {
  server_.start_and_wait();
  for (int i = 0; i < 20; ++i) {  // in the middle of its campaign
    Candidate& one = add(std::to_string(i));
    run_for(milliseconds(i));
    one.election.reset();
  }
  Candidate& last = add("last");
  EXPECT_TRUE(run_until([&] { return last.is_held(); }, milliseconds(1500)));
  server_.suspend();
  run_for(kTtl / 3);  // a turn is under way
  const auto start = Clock::now();
  last.election.reset();
  EXPECT_LT(Clock::now() - start, milliseconds(100));
}

TEST_F(ElectionTest, OutagesAreToldOnceAndALeaderStepsDownInTime) {
  Candidate& a = add("a");
  ASSERT_TRUE(run_until([&] { return !a.outages.empty(); }));
  EXPECT_TRUE(has(a.outages[0], text::format("127.0.0.1:{}: cannot connect", server_.port())) &&
              has(a.outages[0], "Check that etcd runs"))
      << a.outages[0];
  run_for(milliseconds(600));  // it has tried again
  EXPECT_EQ(a.outages.size(), 1U);
  server_.start();
  ASSERT_TRUE(run_until([&] { return a.is_held(); }));

  const auto start = Clock::now();
  server_.suspend();
  ASSERT_TRUE(run_until([&] { return !a.lost.empty(); }));
  EXPECT_LT(Clock::now() - start, kTtl);
  EXPECT_FALSE(a.is_held());
  EXPECT_TRUE(has(a.lost[0], kKey)) << a.lost[0];
  EXPECT_TRUE(has(a.lost[0], "has not confirmed it for 1.8 s")) << a.lost[0];
  EXPECT_TRUE(has(a.lost[0], "Check that etcd runs")) << a.lost[0];

  // The lease and the key outlive a restart; they are of a term that nobody can count on.
  const std::int64_t term = a.term();
  server_.kill();
  server_.start();
  ASSERT_TRUE(run_until([&] { return a.is_held(); }));
  EXPECT_GT(a.term(), term);
  EXPECT_EQ(a.elected.size(), 2U);
  EXPECT_EQ(a.lost.size(), 1U);
  EXPECT_EQ(a.outages.size(), 2U);
}

// Forwards to etcd until it is cut; then connections stay open, but nothing passes.
class Relay {
 public:
  Relay(EventLoop& loop, int target) : loop_(loop), listener_(listen_at("127.0.0.1", 0)) {
    loop_.watch(listener_.get(), POLLIN, [this, target](short) {
      sockets_.emplace_back(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const int in = sockets_.back().get();
      sockets_.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const int out = sockets_.back().get();
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(static_cast<std::uint16_t>(target));
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      ASSERT_EQ(::connect(out, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
      forward(in, out);
      forward(out, in);
    });
  }
  ~Relay() { cut(); }
  void cut() {
    loop_.forget(listener_.get());
    for (const Fd& one : sockets_) loop_.forget(one.get());
  }
  std::string url() const { return text::format("etcd://127.0.0.1:{}", port_of(listener_)); }

 private:
  void forward(int from, int to) {
    loop_.watch(from, POLLIN, [this, from, to](short) {
      std::array<char, 4096> bytes{};
      const ssize_t size = ::recv(from, bytes.data(), bytes.size(), 0);
      if (size > 0) {
        ::send(to, bytes.data(), static_cast<std::size_t>(size), MSG_NOSIGNAL);
      } else {
        loop_.forget(from);
        ::shutdown(to, SHUT_WR);
      }
    });
  }

  EventLoop& loop_;
  const Fd listener_;
  std::vector<Fd> sockets_;
};

TEST_F(ElectionTest, ALeaderThatIsCutOffStepsDownBeforeAnotherIsElected) {
  server_.start_and_wait();
  Relay relay(loop_, server_.port());
  Candidate& a = add("a", kShortTtl, relay.url(), loop_);
  ASSERT_TRUE(run_until([&] { return a.is_held(); }));
  Candidate& b = add("b", kShortTtl);
  ASSERT_TRUE(run_until([&] { return b.term() != 0; }));
  relay.cut();
  ASSERT_TRUE(run_until([&] { return b.is_held(); }));
  EXPECT_FALSE(a.lost.empty());
  EXPECT_GT(b.term(), a.term());
}

TEST_F(ElectionTest, ASuspendedLauncherKnowsThatItLeadsNoLonger) {
  server_.start_and_wait();
  Candidate& a = add("a", kShortTtl, server_.url(), other_loop_);
  const auto run_other_until = [&](auto is_reached) {
    const auto end = Clock::now() + kPatience;
    while (!is_reached() && Clock::now() < end) other_loop_.run_once(milliseconds(5));
    return is_reached();
  };
  ASSERT_TRUE(run_other_until([&] { return a.is_held(); }));
  Candidate& b = add("b", kShortTtl);
  ASSERT_TRUE(run_until([&] { return b.is_held(); }));  // while a's loop does not run
  EXPECT_FALSE(a.is_held());
  EXPECT_TRUE(run_other_until([&] { return !a.lost.empty(); }));
  EXPECT_TRUE(run_other_until([&] { return a.term() == b.term(); }));
  EXPECT_FALSE(a.elected.back().is_self);
}

TEST_F(ElectionTest, KeysOfOthersAndDeletedKeys) {
  server_.start_and_wait();
  const Etcd client = server_.client();
  const std::int64_t lease = client.grant_lease(seconds(60));
  const auto entry = client.put_if_absent(kKey, "hello", lease);
  EXPECT_EQ(entry.value, "hello");
  EXPECT_EQ(client.put_if_absent(kKey, "other", lease).value, "hello");
  EXPECT_EQ(client.get(kKey)->create_revision, entry.create_revision);
  EXPECT_EQ(client.get(kKey)->lease, lease);
  EXPECT_EQ(client.keep_alive(lease), seconds(60));
  Candidate& a = add("a", kShortTtl);
  ASSERT_TRUE(run_until([&] { return !a.outages.empty(); }));
  EXPECT_TRUE(has(a.outages[0], "etcdctl del " + kKey)) << a.outages[0];
  client.revoke(lease);
  client.revoke(lease);  // nothing is there any more
  EXPECT_EQ(client.keep_alive(lease), seconds(0));
  EXPECT_FALSE(client.get(kKey));
  EXPECT_TRUE(
      has(test::error_of([&] { client.put_if_absent(kKey, "x", lease); }), "ended the lease"));
  ASSERT_TRUE(run_until([&] { return a.is_held(); }));
  const std::int64_t term = a.term();
  client.revoke(client.get(kKey)->lease);
  ASSERT_TRUE(run_until([&] { return !a.lost.empty(); }));
  EXPECT_TRUE(has(a.lost[0], "etcd has ended it")) << a.lost[0];
  ASSERT_TRUE(run_until([&] { return a.is_held(); }));
  EXPECT_GT(a.term(), term);
}

TEST_F(ElectionTest, TheNextEndpointAnswersIfOneDoesNot) {
  server_.start_and_wait();
  const Fd silent = listen_at("127.0.0.1", 0);
  const int closed = port_of(listen_at("127.0.0.1", 0));
  const Etcd client(text::format("etcd://127.0.0.1:{},127.0.0.1:{},localhost:{}", closed,
                                 port_of(silent), server_.port()),
                    milliseconds(300));
  EXPECT_FALSE(client.get(kKey));
  const auto start = Clock::now();
  EXPECT_FALSE(client.get(kKey));  // it remembers which
  EXPECT_LT(Clock::now() - start, milliseconds(250));
  server_.kill();
  const std::string error = test::error_of([&] { client.get(kKey); });
  EXPECT_TRUE(has(error, text::format("127.0.0.1:{}: cannot connect", closed)) &&
              has(error, "connected, but no answer within 0.3 s"))
      << error;
}

TEST_F(ElectionTest, Tls) {
  const std::string certificate = server_.folder() + "/certificate";
  const std::string key = server_.folder() + "/key";
  const Fd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  const pid_t maker = spawn(
      {.arguments = {"openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                     "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test",
                     "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate},
       .stderr_fd = nowhere.get()});
  int status = 0;
  ::waitpid(maker, &status, 0);
  ASSERT_EQ(status, 0);
  server_.start({"--cert-file", certificate, "--key-file", key}, "https");
  const Etcd client(text::format("etcds://127.0.0.1:{}", server_.port()), seconds(1));
  const auto limit = Clock::now() + kPatience;
  std::string error;
  do {
    std::this_thread::sleep_for(milliseconds(20));
    error = test::error_of([&] { client.get(kKey); });
  } while (has(error, "cannot connect") && Clock::now() < limit);
  EXPECT_TRUE(has(error, "its certificate is not trusted")) << error;
  ::setenv("SSL_CERT_FILE", certificate.c_str(), 1);
  EXPECT_FALSE(client.get(kKey));
  EXPECT_NE(client.grant_lease(seconds(60)), 0);
  ::unsetenv("SSL_CERT_FILE");
  error = test::error_of([&] { server_.client().get(kKey); });  // without TLS
  EXPECT_TRUE(has(error, "etcds://")) << error;
}

TEST(ElectionArguments, InvalidOnesAreRefused) {
  EventLoop loop;
  const auto error_of = [&](const std::string& url, const std::string& job = "job", int ttl = 2) {
    return test::error_of([&] { Election(loop, url, job, {}, seconds(ttl), {}); });
  };
  for (const char* url : {"", "host:2379", "http://host:2379", "etcd://", "etcd://:2379",
                          "etcd://host:", "etcd://host:0", "etcd://host:65536", "etcd://host:2379x",
                          "etcd://a:1,", "etcd://a:1,,b:2", "etcd://[::1", "etcd://[::1]2379",
                          "etcd://user:password@host:2379", "etcd://host:2379/path"}) {
    const std::string error = error_of(url);
    EXPECT_TRUE(has(error, "Invalid address of etcd") && has(error, "Give etcd://HOST:PORT"))
        << error;
  }
  EXPECT_TRUE(has(error_of("http://host:2379"), "does not begin with etcd:// or etcds://"));
  EXPECT_TRUE(has(error_of("etcd://host:65536"), "'65536' is no port"));
  EXPECT_TRUE(has(error_of("etcd://host:1", ""), "needs the job's id"));
  EXPECT_TRUE(has(error_of("etcd://host:1", "job", 0), "Invalid lease of 0 s"));
  const Etcd client("etcds://a:1,[fe80::1]:22,b", seconds(1));
  std::vector<std::string> endpoints;
  for (const auto& one : client.endpoints()) endpoints.push_back(one.text());
  EXPECT_EQ(endpoints, (std::vector<std::string>{"a:1", "[fe80::1]:22", "b:2379"}));
}

}  // namespace
}  // namespace lockstep
