#include "tail_group.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "failure.h"

namespace k3jax::tail {
namespace {

// What other threads and processes change is accessed by these alone. On x86 they are plain loads
// and stores; elsewhere they keep re-arming before the publication that a peer answers.
template <typename Word>
Word Load(const Word& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <typename Word>
void Store(Word& word, Word value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

constexpr size_t kRememberedRuns = 64;

constexpr size_t RoundUp(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

// The start of a segment: what the ranks know of failures.
struct Control {
  struct Recovery {
    int64_t reached;  // the last failed execution that the rank has left behind
    int64_t armed;    // the last failed execution after which the rank has armed its mailboxes
  };

  pthread_mutex_t mutex;  // guards writing of the next three
  int64_t failed;         // the last execution that failed, 0 for none
  ErrorKind kind;
  char message[1024];
  Recovery ranks[kMaxRanks];
};

namespace {

// A process may be killed while it holds the lock; what it guards is then as good as before.
class ControlLock {
 public:
  explicit ControlLock(Control& control) : control_(control) {
    if (pthread_mutex_lock(&control_.mutex) == EOWNERDEAD) {
      pthread_mutex_consistent(&control_.mutex);
    }
  }
  ~ControlLock() { pthread_mutex_unlock(&control_.mutex); }
  ControlLock(const ControlLock&) = delete;
  ControlLock& operator=(const ControlLock&) = delete;

 private:
  Control& control_;
};

void InitializeMutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

size_t FactsBytes(const Layout& layout) {
  return RoundUp(layout.ranks * kSlots * layout.ranks * sizeof(uint64_t));
}

std::vector<int64_t> AllRanks(const Layout& layout) {
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < layout.ranks; ++rank) ranks.push_back(rank);
  return ranks;
}

struct Groups {
  std::mutex mutex;
  std::map<std::pair<std::vector<int64_t>, Layout>, std::unique_ptr<Group>> by_members;
};

Groups& GetGroups() {
  static auto* groups = new Groups();
  return *groups;
}

}  // namespace

uint64_t CallFacts::Pack() const {
  uint64_t flags = 1 | (two_shot ? 2 : 0) | (scattered ? 4 : 0);  // never 0, which is armed
  return (static_cast<uint64_t>(execution) << 32) | (static_cast<uint64_t>(tokens) << 3) | flags;
}

CallFacts CallFacts::Unpack(uint64_t word) {
  return {static_cast<int64_t>((word & 0xffffffffu) >> 3), (word & 2) != 0, (word & 4) != 0,
          static_cast<int64_t>(word >> 32)};
}

std::string CallFacts::Describe() const {
  return Concat(tokens, " tokens in ", two_shot ? "two shots" : "one shot",
                scattered ? ", scattered" : "", ", in execution ", execution);
}

Group::Group(const Layout& layout)
    : Group(layout, Segment::Private(NumBytes(layout)), AllRanks(layout), true) {}

Group::Group(const Layout& layout, std::unique_ptr<Segment> segment,
             const std::vector<int64_t>& ranks, bool created)
    : layout_(layout),
      segment_(std::move(segment)),
      control_(reinterpret_cast<Control*>(segment_->data())),
      facts_(reinterpret_cast<uint64_t*>(segment_->data() + RoundUp(sizeof(Control)))),
      workspaces_(reinterpret_cast<uint32_t*>(segment_->data() + RoundUp(sizeof(Control)) +
                                              FactsBytes(layout))),
      inside_(layout.ranks, 0) {
  segment_->Claim(ranks);
  if (!created) return;
  InitializeMutex(&control_->mutex);
  for (int64_t rank = 0; rank < layout_.ranks; ++rank) Arm(rank);
}

size_t Group::NumBytes(const Layout& layout) {
  return RoundUp(sizeof(Control)) + FactsBytes(layout) +
         layout.ranks * layout.end() * sizeof(uint32_t);
}

Group& Group::Get(const std::vector<int64_t>& members, const Layout& layout) {
  Groups& groups = GetGroups();
  std::lock_guard<std::mutex> lock(groups.mutex);
  std::unique_ptr<Group>& group = groups.by_members[{members, layout}];
  if (!group) group = std::make_unique<Group>(layout);
  return *group;
}

void Group::Add(const std::vector<int64_t>& members, std::unique_ptr<Group> group) {
  Groups& groups = GetGroups();
  std::lock_guard<std::mutex> lock(groups.mutex);
  const Layout layout = group->layout();
  groups.by_members[{members, layout}] = std::move(group);
}

void Group::Arm(int64_t rank) {
  uint32_t* words = workspace(rank);
  std::fill(words, words + kHeaderWords, 0);
  std::fill(words + kHeaderWords, words + layout_.end(), kArmed);
  words[kMagicWord] = kMagic;
  words[kVersionWord] = kLayoutVersion;
  words[kRanksWord] = layout_.ranks;
  words[kRankWord] = rank;
  words[kMaxTokensWord] = layout_.max_tokens;
  words[kLatentWord] = layout_.latent;
  words[kHiddenWord] = layout_.hidden;
  std::fill(&facts_at(rank, 0, 0), &facts_at(rank, kSlots, 0), 0);
}

// All processes of a group run the same program, so they count alike.
int64_t Group::NumberOf(int64_t run) {
  auto found = std::find(runs_.rbegin(), runs_.rend(), run);
  if (found != runs_.rend()) return executions_ - (found - runs_.rbegin());
  runs_.push_back(run);
  if (runs_.size() > kRememberedRuns) runs_.pop_front();
  return ++executions_;
}

int64_t Group::Enter(int64_t rank, int64_t run) {
  std::unique_lock<std::mutex> lock(mutex_);
  int64_t execution = NumberOf(run);
  if (execution <= Load(control_->failed)) ThrowFailure();  // it failed before this rank came
  if (inside_[rank] != 0) {
    int64_t other = inside_[rank];
    lock.unlock();
    Fail(std::max(execution, other), ErrorKind::kFailedPrecondition,
         Concat("rank ", rank, " enters the fused tail in execution ", execution,
                " while execution ", other,
                " is inside: one workspace serves one program at a time; run them one after the "
                "other"));
  }
  inside_[rank] = execution;
  return execution;
}

void Group::Leave(int64_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  inside_[rank] = 0;
}

void Group::Fail(int64_t execution, ErrorKind kind, const std::string& message) {
  {
    ControlLock lock(*control_);
    if (control_->failed < execution) {
      control_->kind = kind;
      size_t length = message.copy(control_->message, sizeof(control_->message) - 1);
      control_->message[length] = 0;
      Store(control_->failed, execution);
    }
  }
  ThrowFailure();
}

void Group::ThrowFailure() {
  ControlLock lock(*control_);
  throw TailError(control_->kind, control_->message);
}

Call::Call(Group& group, int64_t rank, int64_t run, const CallFacts& facts,
           std::chrono::milliseconds budget)
    : group_(group),
      rank_(rank),
      budget_(budget),
      deadline_(std::chrono::steady_clock::now() + budget),
      execution_(group.Enter(rank, run)) {
  try {
    Recover();
    uint32_t* own = group_.workspace(rank_);
    epoch_ = own[kEpochWord]++;
    previous_ = own[kPreviousWord];
    own[kPreviousWord] = 2 * facts.tokens + facts.two_shot;
    slot_ = epoch_ % kSlots;
    Agree(facts);
  } catch (...) {
    group_.Leave(rank_);
    throw;
  }
}

Call::~Call() { group_.Leave(rank_); }

// Ranks come here one call at a time, so who has reached a failure is in no call of before.
void Call::Recover() {
  Control& control = *group_.control_;
  Control::Recovery& own = control.ranks[rank_];
  for (;;) {
    const int64_t failed = Load(control.failed);
    if (failed >= execution_) group_.ThrowFailure();
    if (own.armed >= failed) return;
    auto await_all = [&](int64_t Control::Recovery::*step) {
      Store(own.*step, failed);
      for (int64_t rank = 0; rank < layout().ranks; ++rank) {
        Await(rank, [&] { return Load(control.ranks[rank].*step) >= failed; });
      }
    };
    await_all(&Control::Recovery::reached);  // nobody may still publish when a mailbox is armed
    group_.Arm(rank_);
    await_all(&Control::Recovery::armed);  // and all must be armed when somebody publishes
  }
}

void Call::Rearm() {
  if (epoch_ == 0) return;
  const Layout& layout = group_.layout_;
  uint32_t* own = group_.workspace(rank_);
  auto arm = [own](int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) Store(own[at + i], kArmed);
  };
  int64_t slot = (slot_ + kSlots - 1) % kSlots;
  int64_t tokens = previous_ / 2;
  bool two_shot = previous_ % 2;
  for (int64_t from = 0; from < layout.ranks; ++from) {
    Store(group_.facts_at(rank_, slot, from), uint64_t{0});
    arm(layout.shared_at(slot, from, 0), tokens * layout.column_row());
    for (int64_t token = 0; token < tokens; ++token) {
      if (two_shot && token % layout.ranks != rank_) continue;
      arm(layout.latent_at(slot, from, token), layout.latent_row());
    }
  }
  if (two_shot) arm(layout.normed_at(slot, 0), tokens * layout.latent_row());
  arm(layout.output_at(slot, 0, 0), tokens * layout.output_row());
}

void Call::Agree(CallFacts facts) {
  facts.execution = execution_ & 0x7fffffff;
  const uint64_t own = facts.Pack();
  for (int64_t to = 0; to < layout().ranks; ++to) Store(group_.facts_at(to, slot_, rank_), own);
  for (int64_t from = 0; from < layout().ranks; ++from) {
    uint64_t other = 0;
    Await(from, [&] { return (other = Load(group_.facts_at(rank_, slot_, from))) != 0; });
    if (other == own) continue;
    const CallFacts theirs = CallFacts::Unpack(other);
    const bool interleaved = theirs.execution != facts.execution;
    group_.Fail(std::max(execution_, theirs.execution),
                interleaved ? ErrorKind::kFailedPrecondition : ErrorKind::kInvalidArgument,
                Concat("ranks disagree on a call of the fused tail: rank ", rank_, " has ",
                       facts.Describe(), "; rank ", from, " has ", theirs.Describe(),
                       interleaved ? ". One workspace serves one program at a time: run them one "
                                     "after the other"
                                   : ". All ranks must make the same calls"));
  }
}

template <typename Condition>
void Call::Await(int64_t from, Condition condition) {
  for (int64_t polls = 1; !condition(); ++polls) {
    std::this_thread::yield();
    if (polls % 64 == 0) LookAround(from);
  }
}

void Call::LookAround(int64_t from) {
  if (Load(group_.control_->failed) >= execution_) group_.ThrowFailure();
  if (group_.segment_->Abandoned(from)) {
    group_.Fail(execution_, ErrorKind::kUnavailable,
                Concat("rank ", rank_, " waits in the fused tail, but the process of rank ", from,
                       " has ended; start all processes of the group again"));
  }
  if (std::chrono::steady_clock::now() > deadline_) {
    group_.Fail(
        execution_, ErrorKind::kDeadlineExceeded,
        Concat("rank ", rank_, " waits for rank ", from, " in the fused tail and gave up after ",
               budget_.count(), " ms; rank ", from, " did not make this call"));
  }
}

void Call::Publish(int64_t to, int64_t at, const uint32_t* words, int64_t count) {
  uint32_t* mailbox = group_.workspace(to) + at;
  for (int64_t i = 0; i < count; ++i) Store(mailbox[i], Canonical(words[i]));
}

void Call::Receive(int64_t from, int64_t at, uint32_t* words, int64_t count) {
  const uint32_t* mailbox = group_.workspace(rank_) + at;
  for (int64_t i = 0; i < count; ++i) {
    Await(from, [&] { return (words[i] = Load(mailbox[i])) != kArmed; });
  }
}

}  // namespace k3jax::tail
