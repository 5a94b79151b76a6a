#include "engine/gloo/own_address.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

EngineContext two_hosts(const std::string& master) {
  EngineContext context;
  context.members = {{.rank = 0, .host_id = "a", .network_id = "a"},
                     {.rank = 1, .host_id = "b", .network_id = "b"}};
  context.master_address = master;
  return context;
}

TEST(OwnAddress, IsNeverTheLoopbackThatOthersCannotReach) {
  for (const std::string master : {"127.0.0.1", "localhost"}) {
    try {
      own_address(two_hosts(master));
      ADD_FAILURE();
    } catch (const UsageError& error) {
      EXPECT_NE(error.message().find("the way to MASTER_ADDR '" + master + "' is the address "),
                std::string::npos)
          << error.what();
      EXPECT_NE(error.message().find("GLOO_SOCKET_IFNAME"), std::string::npos);
    }
  }
}

TEST(OwnAddress, NamesAMasterThatIsNotFound) {
  EXPECT_THROW(own_address(two_hosts("no-such-host.invalid")), SystemError);
}

TEST(EngineContext, TellsHostsFromNetworks) {
  EngineContext context = two_hosts("");
  EXPECT_FALSE(context.is_one_host());
  EXPECT_FALSE(context.is_one_network());
  context.members[1].network_id = context.members[0].network_id;
  EXPECT_TRUE(context.is_one_network());
}

}  // namespace
}  // namespace lockstep
