#include "tail_group.h"

#include <algorithm>
#include <map>
#include <utility>

#include "failure.h"

namespace k3jax::tail {
namespace {

constexpr size_t RoundUp(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

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
      executions_(*segment_, layout.ranks, created),
      facts_(reinterpret_cast<uint64_t*>(segment_->data() + RoundUp(Executions::NumBytes()))),
      workspaces_(
          reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(facts_) + FactsBytes(layout))),
      inside_(layout.ranks, 0) {
  segment_->Claim(ranks);
  if (!created) return;
  for (int64_t rank = 0; rank < layout_.ranks; ++rank) Arm(rank);
}

size_t Group::NumBytes(const Layout& layout) {
  return RoundUp(Executions::NumBytes()) + FactsBytes(layout) +
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

int64_t Group::Enter(int64_t rank, int64_t run) {
  const int64_t execution = executions_.NumberOf(run).first;
  executions_.ThrowIfFailed(execution);  // it failed before this rank came
  std::unique_lock<std::mutex> lock(mutex_);
  if (inside_[rank] != 0) {
    const int64_t other = inside_[rank];
    lock.unlock();
    executions_.Fail(
        std::max(execution, other), FailureKind::kFailedPrecondition,
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

Call::Call(Group& group, int64_t rank, int64_t run, const CallFacts& facts,
           std::chrono::milliseconds budget)
    : group_(group), rank_(rank), deadline_(budget), execution_(group.Enter(rank, run)) {
  try {
    group_.executions_.Recover(rank_, execution_, deadline_, [this] { group_.Arm(rank_); });
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
    group_.executions_.Fail(
        std::max(execution_, theirs.execution),
        interleaved ? FailureKind::kFailedPrecondition : FailureKind::kInvalidArgument,
        Concat("ranks disagree on a call of the fused tail: rank ", rank_, " has ",
               facts.Describe(), "; rank ", from, " has ", theirs.Describe(),
               interleaved ? ". One workspace serves one program at a time: run them one "
                             "after the other"
                           : ". All ranks must make the same calls"));
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
