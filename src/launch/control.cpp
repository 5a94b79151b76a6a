#include "launch/control.h"

#include <lockstep/error.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/env.h"
#include "base/frame.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr int kAnswerMs = 10'000;
constexpr int kMostWaiting = 64;  // to be heard

bool is_private(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
         status.st_uid == ::geteuid() && (status.st_mode & (S_IRWXG | S_IRWXO)) == 0;
}

// Where files may be, by preference: shells and batch jobs of one user have other variables.
std::vector<std::string> folders() {
  const Environment environment = Environment::of_process();
  std::vector<std::string> all;
  if (const auto own = environment.get("XDG_RUNTIME_DIR"); own && is_private(*own)) {
    all.push_back(*own + "/lockstep");
  }
  const std::string name = text::format("/lockstep-{}", ::geteuid());
  for (const std::string& in : {environment.get("TMPDIR").value_or("/tmp"), std::string("/tmp")}) {
    if (std::ranges::find(all, in + name) == all.end()) all.push_back(in + name);
  }
  return all;
}

// This user's alone, or it is not used. Another job that ends may remove it at any moment.
std::string make_folder() {
  constexpr int kTries = 10;
  const std::string path = folders().front();
  for (int left = kTries; left > 0; --left) {
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) break;
    if (is_private(path)) return path;
    if (errno != ENOENT) break;
  }
  throw UsageError({.operation = "lockstep"},
                   text::format("The folder {} for sockets of jobs is not this user's alone.\n"
                                "Remove it, or set XDG_RUNTIME_DIR to a folder of your own.",
                                path));
}

std::string path_of(const std::string& folder, const std::string& job) {
  std::string name = job;
  std::ranges::replace_if(
      name, [](unsigned char one) { return std::isalnum(one) == 0 && one != '-' && one != '.'; },
      '_');
  return text::format("{}/{}.sock", folder, name);
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    throw UsageError({.operation = "lockstep"},
                     text::format("{} is too long for a socket.\nUse a shorter --job-id.", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Nothing, and EAGAIN, if so many wait for an answer that the launcher must be stopped.
Fd connect_to(const std::string& path) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_un address = address_of(path);
  if (!socket ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return {};
  }
  return socket;
}

std::vector<std::string> sockets_in(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code ignored;
  if (!is_private(folder)) return paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().extension() == ".sock") paths.push_back(entry.path());
  }
  return paths;
}

bool is_dead(const std::string& path) { return !connect_to(path) && errno == ECONNREFUSED; }

void remove_stale(const std::string& folder) {
  for (const std::string& path : sockets_in(folder)) {
    if (is_dead(path)) ::unlink(path.c_str());
  }
}

[[noreturn]] void throw_no_answer() {
  throw TimeoutError({.operation = "lockstep"},
                     "The job's launcher has not answered in 10 s.\nLook whether it is stopped.");
}

void wait_for(int socket, short events) {
  pollfd one{socket, events, 0};
  if (::poll(&one, 1, kAnswerMs) <= 0) throw_no_answer();
}

}  // namespace

Control::Control(EventLoop& loop, const std::string& job, Answer answer)
    : loop_(loop), answer_(std::move(answer)) {
  // It listens before it has its name: who finds it there can connect. Another job that ends may
  // remove the folder in the moment before there is a file in it.
  constexpr int kTries = 10;
  for (int left = kTries; path_.empty(); --left) {
    const std::string in = make_folder();
    remove_stale(in);
    const std::string path = path_of(in, job);
    const std::string unnamed = text::format("{}/{}.new", in, ::getpid());
    const sockaddr_un address = address_of(unnamed);
    address_of(path);  // throws, if it is too long
    ::unlink(unnamed.c_str());
    listener_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const bool is_there =
        listener_ &&
        ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
        ::chmod(unnamed.c_str(), 0600) == 0 && ::listen(listener_.get(), kMostWaiting) == 0 &&
        ::link(unnamed.c_str(), path.c_str()) == 0;
    const int error = errno;
    ::unlink(unnamed.c_str());
    if (is_there) {
      path_ = path;
    } else if (!listener_ || error != ENOENT || left == 0) {
      errno = error;
      throw_errno(text::format("cannot make {}", path),
                  "Another job of this user may have the same --job-id: give each its own.");
    }
  }
  loop_.watch(listener_.get(), POLLIN, [this](short) { accept_one(); });
}

Control::~Control() {
  loop_.forget(listener_.get());
  if (path_.empty()) return;
  ::unlink(path_.c_str());
  ::rmdir(path_.substr(0, path_.rfind('/')).c_str());  // if no other job has one
}

void Control::accept_one() {
  Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return;
  const int number = num_connections_++;
  connections_[number] = Connection::make(
      loop_, std::move(socket), nullptr, true,
      {.received =
           [this, number](const Json& request) {
             Json reply;
             try {
               reply = answer_(request);
             } catch (const Error& error) {
               reply = {{"error", error.message()}};
             } catch (const Json::exception& error) {
               reply = {{"error", error.what()}};
             }
             connections_.at(number)->send(reply);
           },
       .closed = [this, number](const std::string&) { connections_.erase(number); }});
}

void remove_dead_jobs() noexcept {
  try {
    for (const std::string& in : folders()) {
      remove_stale(in);
      if (is_private(in)) ::rmdir(in.c_str());  // if no other job has one
    }
  } catch (const std::exception&) {  // NOLINT: there is no memory; they are found later
  }
}

std::vector<std::string> running_jobs() {
  std::vector<std::string> jobs;
  for (const std::string& in : folders()) {
    for (const std::string& path : sockets_in(in)) {
      if (!is_dead(path)) jobs.push_back(std::filesystem::path(path).stem());
    }
  }
  std::ranges::sort(jobs);
  return jobs;
}

Json ask_job(const std::string& job, const Json& request) {
  Fd socket;
  for (const std::string& in : folders()) {
    if (!is_private(in)) continue;
    socket = connect_to(path_of(in, job));
    if (!socket && errno == EAGAIN) throw_no_answer();
    if (socket) break;
  }
  if (!socket) {
    const std::vector<std::string> jobs = running_jobs();
    throw UsageError({.operation = "lockstep"},
                     text::format("There is no job '{}' of this user on this host.\n{}", job,
                                  jobs.empty() ? "None is running here: ask on its first host."
                                               : "Running: " + text::join(jobs, ", ") + "."));
  }
  const std::string frame = to_frame(Json::to_cbor(request));
  wait_for(socket.get(), POLLOUT);
  if (::send(socket.get(), frame.data(), frame.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(frame.size())) {
    throw_errno("cannot ask the job", "Look whether its launcher is still there.");
  }
  std::string received;
  while (received.size() < kFrameHead ||
         received.size() < kFrameHead + frame_size(received.substr(0, kFrameHead))) {
    wait_for(socket.get(), POLLIN);
    std::array<char, 4096> some{};
    const ssize_t count = ::recv(socket.get(), some.data(), some.size(), 0);
    if (count <= 0) {
      throw SystemError({.operation = "lockstep"}, errno,
                        "The job's launcher has closed the connection.\nThe job may have ended.");
    }
    received.append(some.data(), static_cast<std::size_t>(count));
  }
  const Json reply = Json::from_cbor(received.substr(kFrameHead));
  if (reply.is_object() && reply.contains("error")) {
    throw UsageError({.operation = "lockstep"}, reply.at("error").get<std::string>());
  }
  return reply;
}

}  // namespace lockstep
