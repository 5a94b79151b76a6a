#include "support/net_hosts.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <stdexcept>

#include "base/text.h"

namespace lockstep::test {
namespace {

// What the command prints. Throws if it fails.
std::string run(const std::string& command) {
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  std::string output;
  std::array<char, 4096> buffer{};
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), count);
  }
  if (::pclose(pipe) != 0) throw std::runtime_error(command + " failed:\n" + output);
  return output;
}

// In ranks (run_ranks.h), which are copies of the test.
bool is_rank() { return std::getenv("LOCKSTEP_TEST_RANK") != nullptr; }

constexpr const char* kPrefix = "lockstep-test-";

// Left behind by tests that were killed: their names end in the number of a process that is gone.
void remove_old() {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/run/netns", none)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const pid_t owner = std::atoi(name.c_str() + std::string(kPrefix).size());
    if (::kill(owner, 0) != 0) run("ip netns del " + name);
  }
}

}  // namespace

NetHosts::NetHosts(int count, const std::string& rate)
    : count_(count), name_(text::format("{}{}", kPrefix, ::getpid())) {
  if (is_rank()) return;
  remove_old();
  const std::string net = name_of(-1);
  run("ip netns add " + net);
  run(text::format("ip -n {} link add switch type bridge", net));
  run(text::format("ip -n {} link set switch up", net));
  for (int host = 0; host < count; ++host) {
    const std::string name = name_of(host);
    run("ip netns add " + name);
    run(text::format("ip -n {} link set lo up", name));
    run(text::format("ip -n {} link add cable type veth peer name port{} netns {}", name, host,
                     net));
    run(text::format("ip -n {} link set port{} master switch up", net, host));
    run(text::format("ip -n {} addr add {}/24 dev cable", name, address(host)));
    run(text::format("ip -n {} link set cable up", name));
    if (!rate.empty()) set_rate(host, rate);
  }
}

NetHosts::~NetHosts() {
  if (is_rank()) return;
  for (int host = -1; host < count_; ++host) {
    try {
      run("ip netns del " + name_of(host));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
  }
}

std::string NetHosts::name_of(int host) const {
  return host < 0 ? name_ + "-net" : text::format("{}-{}", name_, host);
}

std::string NetHosts::address(int host) const { return text::format("10.77.0.{}", host + 1); }

std::string NetHosts::host_name(int host) { return text::format("testhost{}", host); }

std::vector<std::string> NetHosts::prefix(int host) const {
  return {"ip",
          "netns",
          "exec",
          name_of(host),
          "unshare",
          "--uts",
          "sh",
          "-c",
          text::format("echo {} > /proc/sys/kernel/hostname && exec \"$@\"", host_name(host)),
          "sh"};
}

std::string NetHosts::why_not() {
  if (is_rank()) return {};
  if (::geteuid() != 0) return "network namespaces need root";
  try {
    const std::string name = text::format("{}{}-try", kPrefix, ::getpid());
    run(text::format("ip netns add {0} && ip netns del {0}", name));
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

void NetHosts::kill(int host) {
  std::istringstream pids(run("ip netns pids " + name_of(host)));
  for (pid_t pid = 0; pids >> pid;) ::kill(pid, SIGKILL);
}

void NetHosts::cut(int host) {
  run(text::format("ip -n {} link set port{} down", name_of(-1), host));
}

void NetHosts::set_offload(bool is_on) {
  for (int host = 0; host < count_; ++host) {
    run(text::format("ip -n {} link set cable gso_max_segs {}", name_of(host), is_on ? 65535 : 1));
  }
}

void NetHosts::set_rate(int host, const std::string& rate) {
  run(text::format("tc -n {} qdisc replace dev cable root tbf rate {} burst 256kb latency 100ms",
                   name_of(host), rate));
}

std::vector<std::string> NetHosts::launcher(int host, const std::vector<int>& ranks) const {
  std::vector<std::string> command = prefix(host);
  for (const std::string& word : std::vector<std::string>{
           LOCKSTEP_PROGRAM, "run", "-n", std::to_string(ranks[static_cast<std::size_t>(host)]),
           "--hosts", std::to_string(ranks.size()), "--host-rank", std::to_string(host), "--master",
           address(0) + ":29500", "--"}) {
    command.push_back(word);
  }
  return command;
}

}  // namespace lockstep::test
