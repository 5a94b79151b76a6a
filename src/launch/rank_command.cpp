#include "launch/rank_command.h"
#include "base/text.h"

namespace lockstep {

Command rank_command(std::vector<std::string> arguments, int rank, int size, int store_fd) {
  Command command;
  command.arguments = std::move(arguments);
  command.variables["RANK"] = command.variables["LOCAL_RANK"] = std::to_string(rank);
  command.variables["WORLD_SIZE"] = command.variables["LOCAL_WORLD_SIZE"] = std::to_string(size);
  command.variables["LOCKSTEP_STORE"] = text::format("fd:{}", store_fd);
  command.inherited_fds = {store_fd};
  return command;
}

}  // namespace lockstep
