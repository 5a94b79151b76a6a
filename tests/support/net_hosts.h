// NetHosts: hosts of a test: network namespaces of one machine, each with a cable to a switch.
//
// Namespaces, cables and switch are made here and gone at the end, also those of a test that was
// killed, when the next one begins. Needs root and iproute2.
#pragma once

#include <cstdint>
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

  std::string address(int host) const;
  // What runs a command on a host; put it before the command.
  std::vector<std::string> prefix(int host) const;

  void cut(int host);  // pulls the cable
  void set_rate(int host, const std::string& rate);
  std::uint64_t bytes_sent(int host) const;  // by its cable, headers included

 private:
  std::string name_of(int host) const;

  int count_;
  std::string name_;
};

}  // namespace lockstep::test
