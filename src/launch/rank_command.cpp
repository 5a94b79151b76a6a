#include "launch/rank_command.h"

#include "base/text.h"

namespace lockstep {

std::map<std::string, std::string> variables_of(const RankPlace& place) {
  std::map<std::string, std::string> variables = {
      {"RANK", std::to_string(place.rank)},
      {"WORLD_SIZE", std::to_string(place.world_size)},
      {"LOCAL_RANK", std::to_string(place.local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(place.local_size)},
      {"GROUP_RANK", std::to_string(place.host_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(place.num_hosts)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(place.restart)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(place.max_restarts)}};
  if (place.master_port != 0) {
    variables["MASTER_ADDR"] = place.master_host;
    variables["MASTER_PORT"] = std::to_string(place.master_port);
  }
  return variables;
}

void pass_store(Command& command, int store_fd) {
  command.variables["LOCKSTEP_STORE"] = text::format("fd:{}", store_fd);
  command.inherited_fds.push_back(store_fd);
}

Command rank_command(std::vector<std::string> arguments, int rank, int size, int store_fd) {
  Command command;
  command.arguments = std::move(arguments);
  command.variables =
      variables_of({.rank = rank, .world_size = size, .local_rank = rank, .local_size = size});
  pass_store(command, store_fd);
  return command;
}

}  // namespace lockstep
