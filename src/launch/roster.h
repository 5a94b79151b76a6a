// Roster: who is in which generation of an elastic job, and who will be in the next one.
//
// A generation is a list of processes, by rank. It ends when one of them is gone, or, at the end of
// a step, when a change is wanted: a newcomer waits, or a member is to leave. The next one is
// formed when all living members have asked for it. Processes ask again and again until they are
// told. Pure: it knows neither processes nor time. Threading: none.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class Roster {
 public:
  using Seat = std::pair<int, int>;  // a host, and a place on it that a process has

  struct Answer {
    enum class Kind {
      kWait,    // ask again
      kJoin,    // the generation below, as this rank
      kLeave,   // this process is not needed any more
      kIntact,  // nobody is lost and no change is wanted: there is no reason for a new generation
    };
    Kind kind = Kind::kWait;
    int generation = 0;
    int rank = 0;
    int size = 0;
  };

  // The first generation: all start together, and none is elastic before all have entered.
  void begin(int generation, const std::vector<Seat>& seats);
  // A member of the first generation has come to the part of the program that survives losses.
  void enter(Seat seat, int num_logical);
  bool is_open() const;  // all members have
  // What is left of a job whose coordinator was lost. Its members form the next generation, at the
  // latest at the end of a step: the store of this one is gone.
  struct Known {
    Seat seat = {};
    int rank = -1;  // -1: a newcomer
    bool has_entered = false;
    bool is_done = false;
  };
  void restore(int generation, int num_logical, const std::vector<Known>& processes);
  // A process was started there: a newcomer.
  void add(Seat seat);
  void set_leaving(Seat seat);
  // The training of a member is complete. It is over for all at once, when that of every living
  // member is; if one was lost before, the others re-form.
  enum class Finish { kWait, kOver, kReform };
  Finish finish(Seat seat);

  // What a process was that has ended.
  enum class Role { kNone, kNewcomer, kMember, kDone };
  Role remove(Seat seat);

  // A process of generation `from` (-1: a newcomer) can go on only in the next one. `is_planned`:
  // at the end of a step, as all members agreed.
  Answer ask(Seat seat, int from, bool is_planned);

  int generation() const { return generation_; }
  // More than generation() if members are to ask for the next one at the end of a step.
  int wanted() const { return generation_ + (is_change_wanted() ? 1 : 0); }
  // Generations below this one have lost a member. After restore(), members go on until they miss
  // somebody: it may be that nobody is lost.
  int num_ended() const { return generation_ + (is_broken_ && !is_restored_ ? 1 : 0); }
  int num_logical() const { return num_logical_; }
  std::vector<Seat> members() const;    // by rank
  int num_members() const;              // living, without those that are to leave or are done
  bool has_done() const;                // some member's training is complete
  bool is_done() const;                 // every living member's is
  std::vector<Seat> newcomers() const;  // not yet admitted
  bool has(Seat seat) const { return processes_.contains(seat); }
  bool is_leaving(Seat seat) const;
  int rank_of(Seat seat) const;  // in this generation; -1: it is no member

 private:
  struct Process {
    bool is_member = false;
    bool has_entered = false;
    bool is_ready = false;  // has asked for the next generation
    bool is_leaving = false;
    bool is_finishing = false;
    bool is_done = false;
    int rank = -1;
  };

  bool is_change_wanted() const;
  void form_if_ready();

  std::map<Seat, Process> processes_;
  int generation_ = -1;
  int num_logical_ = 0;       // at most so many members; 0: not known
  bool is_broken_ = false;    // a member of this generation is gone
  bool is_agreed_ = false;    // members come at the end of a step
  bool is_restored_ = false;  // and the next generation is not formed yet
};

}  // namespace lockstep
