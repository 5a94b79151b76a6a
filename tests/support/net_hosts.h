// NetHosts: hosts of a test or benchmark: network namespaces of one machine, each with a name of
// its own and a cable to a switch.
//
// Namespaces, cables and switch are made here and gone at the end, also those of a test that was
// killed, when the next one begins. Needs root and iproute2. In ranks (run_ranks.h) there are none.
#pragma once

#include <string>
#include <vector>

namespace lockstep::test {

class NetHosts {
 public:
  // `rate` as tc(8) writes it, for what each host sends; empty: as fast as the machine can.
  explicit NetHosts(int count, const std::string& rate = "");
  ~NetHosts();
  NetHosts(const NetHosts&) = delete;
  NetHosts& operator=(const NetHosts&) = delete;

  // Why they cannot be here; empty if they can.
  static std::string why_not();

  std::string address(int host) const;
  static std::string host_name(int host);
  // What runs a command on a host; put it before the command.
  std::vector<std::string> prefix(int host) const;
  // The same for a command that `lockstep run` starts on each host, so many times on each. Needs
  // LOCKSTEP_SECRET.
  std::vector<std::string> launcher(int host, const std::vector<int>& ranks) const;

  void cut(int host);   // pulls the cable
  void kill(int host);  // all its processes
  void set_rate(int host, const std::string& rate);
  // Off: packets are as they are on a wire, instead of 64 KiB with one header. Costs much time.
  void set_offload(bool is_on);

 private:
  std::string name_of(int host) const;

  int count_;
  std::string name_;
};

}  // namespace lockstep::test
