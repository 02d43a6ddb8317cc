#include "tail_group.h"

#include <algorithm>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "failure.h"

namespace k3jax::tail {
namespace {

// Mailboxes are plain memory that other threads change: every access is a relaxed atomic one.
template <typename Word>
Word Load(const Word& word) {
  return __atomic_load_n(&word, __ATOMIC_RELAXED);
}

template <typename Word>
void Store(Word& word, Word value) {
  __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}

}  // namespace

uint64_t CallFacts::Pack() const {
  uint64_t flags = 1 | (two_shot ? 2 : 0) | (scattered ? 4 : 0);  // never 0, which is armed
  return (static_cast<uint64_t>(run) << 32) | (static_cast<uint64_t>(tokens) << 3) | flags;
}

CallFacts CallFacts::Unpack(uint64_t word) {
  return {static_cast<int64_t>(word >> 32), static_cast<int64_t>((word & 0xffffffffu) >> 3),
          (word & 2) != 0, (word & 4) != 0};
}

std::string CallFacts::Describe() const {
  return Concat(tokens, " tokens in ", two_shot ? "two shots" : "one shot",
                scattered ? ", scattered" : "", ", in execution ", run);
}

Group::Group(const Layout& layout)
    : layout_(layout),
      workspaces_(layout.ranks, std::vector<uint32_t>(layout.end())),
      facts_(layout.ranks * kSlots * layout.ranks),
      inside_(layout.ranks, 0) {
  Arm();
}

Group& Group::Get(int64_t number, const Layout& layout) {
  static std::mutex mutex;
  static auto* groups = new std::map<std::pair<int64_t, Layout>, std::unique_ptr<Group>>();
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Group>& group = (*groups)[{number, layout}];
  if (!group) group = std::make_unique<Group>(layout);
  return *group;
}

void Group::Arm() {
  for (int64_t rank = 0; rank < layout_.ranks; ++rank) {
    std::vector<uint32_t>& words = workspaces_[rank];
    std::fill(words.begin(), words.begin() + kHeaderWords, 0);
    std::fill(words.begin() + kHeaderWords, words.end(), kArmed);
    words[kMagicWord] = kMagic;
    words[kVersionWord] = kLayoutVersion;
    words[kRanksWord] = layout_.ranks;
    words[kRankWord] = rank;
    words[kMaxTokensWord] = layout_.max_tokens;
    words[kLatentWord] = layout_.latent;
    words[kHiddenWord] = layout_.hidden;
  }
  std::fill(facts_.begin(), facts_.end(), 0);
}

void Group::Enter(int64_t rank, int64_t run, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (broken_ && !failed_runs_.count(run)) {
    // Whoever is still inside belongs to the failed execution and is on its way out.
    auto nobody = [this] {
      return std::all_of(inside_.begin(), inside_.end(), [](int64_t run) { return run == 0; });
    };
    if (!left_.wait_until(lock, deadline, nobody)) {
      throw TailError(ErrorKind::kDeadlineExceeded,
                      Concat("rank ", rank, " waited in vain for a failed execution to leave the "
                             "fused tail; it failed with: ", first_error_));
    }
  }
  // Asked after the wait: this execution may have failed on another rank meanwhile.
  if (failed_runs_.count(run)) throw TailError(first_kind_, first_error_);
  if (broken_) {  // the first to come resets for all
    Arm();
    broken_ = false;
  }
  if (inside_[rank] != 0) {
    int64_t other = inside_[rank];
    lock.unlock();
    Fail(run, TailError(ErrorKind::kFailedPrecondition,
                        Concat("rank ", rank, " enters the fused tail in execution ", run,
                               " while execution ", other, " is inside: one workspace serves one "
                               "program at a time; run them one after the other")));
  }
  inside_[rank] = run;
}

void Group::Leave(int64_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  inside_[rank] = 0;
  left_.notify_all();
}

void Group::Fail(int64_t run, const TailError& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_) {
    first_kind_ = error.kind();
    first_error_ = error.what();
    broken_ = true;
  }
  failed_runs_.insert(run);
  for (int64_t inside : inside_) {
    if (inside != 0) failed_runs_.insert(inside);
  }
  throw TailError(first_kind_, first_error_);
}

Call::Call(Group& group, int64_t rank, const CallFacts& facts, std::chrono::milliseconds budget)
    : group_(group),
      rank_(rank),
      run_(facts.run),
      budget_(budget),
      deadline_(std::chrono::steady_clock::now() + budget) {
  group_.Enter(rank, run_, deadline_);
  try {
    std::vector<uint32_t>& own = group_.workspaces_[rank_];
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

void Call::Rearm() {
  if (epoch_ == 0) return;
  const Layout& layout = group_.layout_;
  std::vector<uint32_t>& own = group_.workspaces_[rank_];
  auto arm = [&own](int64_t at, int64_t count) {
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

void Call::Agree(const CallFacts& facts) {
  uint64_t own = facts.Pack();
  for (int64_t to = 0; to < group_.layout_.ranks; ++to) {
    Store(group_.facts_at(to, slot_, rank_), own);
  }
  for (int64_t from = 0; from < group_.layout_.ranks; ++from) {
    uint64_t other = Poll(group_.facts_at(rank_, slot_, from), uint64_t{0}, from);
    if (other == own) continue;
    CallFacts theirs = CallFacts::Unpack(other);
    bool interleaved = theirs.run != CallFacts::Unpack(own).run;
    group_.Fail(run_, TailError(interleaved ? ErrorKind::kFailedPrecondition
                                            : ErrorKind::kInvalidArgument,
                                Concat("ranks disagree on a call of the fused tail: rank ", rank_,
                                       " has ", facts.Describe(), "; rank ", from, " has ",
                                       theirs.Describe(),
                                       interleaved
                                           ? ". One workspace serves one program at a time: run "
                                             "them one after the other"
                                           : ". All ranks must make the same calls")));
  }
}

template <typename Word>
Word Call::Poll(const Word& word, Word armed, int64_t from) {
  for (int64_t polls = 1;; ++polls) {
    Word value = Load(word);
    if (value != armed) return value;
    std::this_thread::yield();
    if (polls % 64 != 0) continue;
    if (group_.broken_) {
      std::lock_guard<std::mutex> lock(group_.mutex_);
      throw TailError(group_.first_kind_, group_.first_error_);
    }
    if (std::chrono::steady_clock::now() > deadline_) {
      group_.Fail(run_, TailError(ErrorKind::kDeadlineExceeded,
                                  Concat("rank ", rank_, " waits for rank ", from,
                                         " in the fused tail and gave up after ", budget_.count(),
                                         " ms; rank ", from,
                                         " did not make this call, or its process has stopped")));
    }
  }
}

void Call::Publish(int64_t to, int64_t at, const uint32_t* words, int64_t count) {
  uint32_t* mailbox = group_.workspaces_[to].data() + at;
  for (int64_t i = 0; i < count; ++i) Store(mailbox[i], Canonical(words[i]));
}

void Call::Receive(int64_t from, int64_t at, uint32_t* words, int64_t count) {
  const uint32_t* mailbox = group_.workspaces_[rank_].data() + at;
  for (int64_t i = 0; i < count; ++i) words[i] = Poll(mailbox[i], kArmed, from);
}

}  // namespace k3jax::tail
