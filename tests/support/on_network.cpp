#include "support/net_hosts.h"
#include "support/run_ranks.h"

namespace lockstep::test {

RankOptions on_network(const NetHosts& hosts, const std::vector<int>& ranks) {
  RankOptions options;
  for (int host = 0; host < static_cast<int>(ranks.size()); ++host) {
    options.launchers.push_back(hosts.launcher(host, ranks));
  }
  options.variables["LOCKSTEP_SECRET"] = "VGhlIHNlY3JldCBvZiB0aGUgdGVzdHMsIGluIGJhc2U2NA==";
  return options;
}

}  // namespace lockstep::test
