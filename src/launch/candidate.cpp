#include "launch/candidate.h"

#include <utility>

#include "base/text.h"

namespace lockstep {

Candidate::Candidate(EventLoop& loop, Output& output, Host& host, const RunOptions& options)
    : loop_(loop), output_(output), host_(host), options_(options) {
  remote_ = std::make_unique<RemoteLeader>(loop, output, host, options);
  election_.emplace(
      loop, options.coordinator, options.job_id,
      ElectedLeader{
          .address = options.master_host, .port = options.master_port, .host = host_name()},
      kLeaseTtl,
      Election::Callbacks{
          .elected = [this](const ElectedLeader& leader) { on_elected(leader); },
          .lost = [this](const std::string& reason) { on_lost(reason); },
          .unreachable = [this](const std::string& reason) { on_unreachable(reason); }});
}

void Candidate::resign(std::function<void()> done) {
  if (!std::exchange(is_resigned_, true)) return election_->resign(std::move(done));
  if (done) done();
}

void Candidate::on_elected(const ElectedLeader& leader) {
  if (host_.exit_code() || coordinator_) return;
  if (!leader.is_self) return remote_->follow(leader);
  if (remote_->is_ending()) return resign();
  Handover handover = remote_->hand_over();
  remote_.reset();
  coordinator_ = std::make_unique<Coordinator>(loop_, output_, host_, options_, std::move(handover),
                                               [this] { return election_->is_held(); });
}

void Candidate::on_lost(const std::string& reason) {
  resign();
  if (coordinator_) coordinator_->step_down(reason);
}

void Candidate::on_unreachable(const std::string& reason) {
  if (host_.exit_code()) return;
  if (remote_) remote_->set_problem(reason);
  const bool goes_on = coordinator_ || remote_->is_connected();
  output_.say(text::format("{}{}", reason, goes_on ? "\nlockstep: the job goes on meanwhile" : ""));
}

}  // namespace lockstep
