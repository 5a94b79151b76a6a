// What all benchmarks need to run ranks: start them and wait, give each a core, name the machine.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/process.h"

namespace lockstep::bench {

// Binds the calling thread to a core of its own, as launchers do; threads that the engines have
// started stay free. With more ranks than cores, all stay free.
void bind_to_core(int rank, int size);

std::string cpu_name();

// This program, as a command that its own copies can be started by.
std::string this_program();

using OnStarted = std::function<void(const std::vector<pid_t>& started)>;

// Starts the commands together and waits for all. If one fails, the others are killed and stderr
// says which. `outputs`, if given, gets what each wrote to its standard output; `on_started`, if
// given, is called before waiting. Returns 0 if all succeeded, else 1.
int run_and_wait(std::vector<Command> commands, std::vector<std::string>* outputs = nullptr,
                 const OnStarted& on_started = {});

// The same for `num_ranks` ranks of one command, which meet in memory: no port is opened.
int run_ranks(int num_ranks, const std::vector<std::string>& arguments,
              const std::map<std::string, std::string>& variables,
              std::vector<std::string>* outputs = nullptr, const OnStarted& on_started = {});

// The last line of a bench, and its exit code: 1 if a value was wrong or a run failed.
int verdict(std::int64_t wrong, std::int64_t failed, bool is_json);

}  // namespace lockstep::bench
