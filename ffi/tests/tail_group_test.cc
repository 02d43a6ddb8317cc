// The fused tail's protocol between threads and between processes: every word checked, ranks fast
// and slow, failures.

#include "../tail_group.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace k3jax::tail {
namespace {

using std::chrono::milliseconds;

const Layout kLayout{4, 6, 8, 16};
int64_t next_run = 1;

// The word that rank `from` publishes in a call; some have a -0 half, some are the armed word.
uint32_t Word(int64_t call, int64_t from, int64_t token, int64_t i) {
  uint32_t word = static_cast<uint32_t>((call * 31 + from) * 1000 + token * 50 + i + 1);
  if (word % 3 == 0) return kArmed | (word % 2 == 0 ? 0 : word & 0x7fff);
  return word;
}

struct Plan {
  int64_t tokens;
  bool two_shot;
};

// One rank's part of a call, with the exchange pattern of the tail; `pause` delays its re-arming.
// Returns what went wrong.
std::string Exchange(Call& call, int64_t number, const Plan& plan, bool pause = false) {
  const Layout& layout = call.layout();
  std::vector<uint32_t> words(layout.latent_row());
  for (int64_t token = 0; token < plan.tokens; ++token) {
    for (int64_t i = 0; i < layout.latent_row(); ++i) {
      words[i] = Word(number, call.rank(), token, i);
    }
    for (int64_t to = 0; to < layout.ranks; ++to) {
      if (plan.two_shot && to != token % layout.ranks) continue;
      call.Publish(to, layout.latent_at(call.slot(), call.rank(), token), words.data(),
                   layout.latent_row());
    }
  }
  if (pause) std::this_thread::sleep_for(std::chrono::microseconds(200));
  call.Rearm();
  for (int64_t token = 0; token < plan.tokens; ++token) {
    bool owner = token % layout.ranks == call.rank();
    for (int64_t from = 0; (owner || !plan.two_shot) && from < layout.ranks; ++from) {
      call.Receive(from, layout.latent_at(call.slot(), from, token), words.data(),
                   layout.latent_row());
      for (int64_t i = 0; i < layout.latent_row(); ++i) {
        if (words[i] != Canonical(Word(number, from, token, i))) return "a latent word is stale";
      }
    }
    for (int64_t to = 0; owner && plan.two_shot && to < layout.ranks; ++to) {
      call.Publish(to, layout.normed_at(call.slot(), token), words.data(), layout.latent_row());
    }
  }
  for (int64_t token = 0; plan.two_shot && token < plan.tokens; ++token) {
    call.Receive(token % layout.ranks, layout.normed_at(call.slot(), token), words.data(),
                 layout.latent_row());
    for (int64_t i = 0; i < layout.latent_row(); ++i) {
      if (words[i] != Canonical(Word(number, layout.ranks - 1, token, i))) {
        return "a finished word is stale";
      }
    }
  }
  return "";
}

const std::vector<int64_t> kAllRanks{0, 1, 2, 3};

// Runs `body(rank)` on a thread a rank; returns what each threw or returned.
template <typename Body>
std::vector<std::string> OnRanks(const std::vector<int64_t>& ranks, Body body) {
  std::vector<std::string> said(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        said[i] = body(ranks[i]);
      } catch (const Failure& error) {
        said[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return said;
}

bool AllSay(const std::vector<std::string>& said, const std::string& piece) {
  for (const std::string& one : said) {
    if (one.find(piece) == std::string::npos) return false;
  }
  return true;
}

std::vector<std::string> Run(Group& group, int64_t calls, unsigned seed,
                             const std::vector<int64_t>& ranks = kAllRanks) {
  int64_t run = next_run++;
  std::vector<Plan> plans;
  std::mt19937 random(seed);
  for (int64_t i = 0; i < calls; ++i) {
    plans.push_back({1 + static_cast<int64_t>(random() % 6), random() % 2 == 0});
  }
  return OnRanks(ranks, [&](int64_t rank) -> std::string {
    std::mt19937 pace(seed + rank);
    for (int64_t number = 0; number < calls; ++number) {
      if (pace() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pace() % 300));
      const Plan& plan = plans[number];
      Call call(group, rank, run, {plan.tokens, plan.two_shot, false}, milliseconds(20000));
      std::string wrong = Exchange(call, number, plan, pace() % 8 == 0);
      if (!wrong.empty()) return wrong;
    }
    return "";
  });
}

TEST(NoWordIsLostOrStaleWhoeverIsSlow) {
  Group group(kLayout);
  for (unsigned seed : {1u, 2u, 3u}) {
    for (const std::string& said : Run(group, 400, seed)) CHECK(said.empty());
  }
}

TEST(AnAbsentRankIsNamedOnAllOthersAndTheNextRunIsClean) {
  Group group(kLayout);
  for (int round = 0; round < 3; ++round) {
    int64_t run = next_run++;
    auto said = OnRanks(kAllRanks, [&](int64_t rank) -> std::string {
      if (rank == 2) return "waits for rank 2";
      Call call(group, rank, run, {3, false, false}, milliseconds(400));
      return Exchange(call, 0, {3, false});
    });
    CHECK(AllSay(said, "waits for rank 2"));
    // Its late arrival belongs to the failed execution.
    CHECK_THROWS(Call(group, 2, run, {3, false, false}, milliseconds(100)), "waits for rank 2");
    for (const std::string& one : Run(group, 20, round)) CHECK(one.empty());
    CHECK_THROWS(Call(group, 2, run, {3, false, false}, milliseconds(100)), "rank 2");
  }
}

TEST(MoreRanksThanThereIsRoomForAreRefused) {
  CHECK_THROWS(Group({kMaxRanks + 1, 6, 8, 34}), "1 to 16 ranks, got 17");
}

TEST(DisagreementIsNamedOnAllRanks) {
  Group group(kLayout);
  int64_t run = next_run++;
  auto said = OnRanks(kAllRanks, [&](int64_t rank) -> std::string {
    Plan plan{rank == 3 ? 2 : 5, false};
    Call call(group, rank, run, {plan.tokens, false, false}, milliseconds(5000));
    return Exchange(call, 0, plan);
  });
  CHECK(AllSay(said, "ranks disagree"));
  CHECK(AllSay(said, "2 tokens in one shot"));
  for (const std::string& one : Run(group, 20, 7)) CHECK(one.empty());
}

TEST(TwoExecutionsAtOnceAreRefused) {
  Group group(kLayout);
  int64_t run = next_run;
  next_run += 2;
  auto said = OnRanks(kAllRanks, [&](int64_t rank) -> std::string {
    Call call(group, rank, run + rank % 2, {1, false, false}, milliseconds(5000));
    return Exchange(call, 0, {1, false});
  });
  CHECK(AllSay(said, "one program at a time"));
  for (const std::string& one : Run(group, 20, 9)) CHECK(one.empty());
}

// Two ranks here and two in a child, which does `in_child(group)` and ends with what it returns.
class TwoProcesses {
 public:
  template <typename Body>
  explicit TwoProcesses(Body in_child) {
    const std::string name = "/k3jax-test-" + std::to_string(getpid());
    const size_t num_bytes = Group::NumBytes(kLayout);
    group_ = std::make_unique<Group>(kLayout, Segment::Create(name, num_bytes), kHere, true);
    child_ = fork();
    if (child_ == 0) {
      Group group(kLayout, Segment::Open(name, num_bytes), kThere, false);
      kill(getpid(), SIGSTOP);  // until the parent knows that the ranks are claimed
      _exit(in_child(group) ? 0 : 1);
    }
    int status;
    waitpid(child_, &status, WUNTRACED);
    Segment::Unlink(name);
    kill(child_, SIGCONT);
  }

  Group& group() { return *group_; }

  // How the child ended: its exit code, or minus the signal.
  int Join() {
    int status;
    waitpid(child_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  static inline const std::vector<int64_t> kHere{0, 2}, kThere{1, 3};

 private:
  std::unique_ptr<Group> group_;
  pid_t child_;
};

bool Clean(const std::vector<std::string>& said) {
  for (const std::string& one : said) {
    if (!one.empty()) return false;
  }
  return true;
}

TEST(TwoProcessesExchangeEveryWord) {
  TwoProcesses processes([](Group& group) { return Clean(Run(group, 300, 11, {1, 3})); });
  CHECK(Clean(Run(processes.group(), 300, 11, {0, 2})));
  CHECK(processes.Join() == 0);
}

// Ranks 0 to 2 make a call; rank 3 stays away, or makes one when rank 1 has given up, if it shall.
// The others are patient for longer than one process may be ahead of the other on a busy machine.
std::vector<std::string> WithoutRank3(Group& group, const std::vector<int64_t>& ranks, bool late) {
  int64_t run = next_run++;
  std::atomic<bool> given_up = false;
  return OnRanks(ranks, [&](int64_t rank) -> std::string {
    if (rank == 3 && !late) return "waits for rank 3";
    while (rank == 3 && !given_up) std::this_thread::sleep_for(milliseconds(1));
    try {
      Call call(group, rank, run, {3, false, false}, milliseconds(3000));
      return Exchange(call, 0, {3, false});
    } catch (const Failure&) {
      given_up = true;
      throw;
    }
  });
}

TEST(AfterAFailureOverTwoProcessesTheNextRunIsClean) {
  for (bool late : {false, true}) {
    auto both = [late](Group& group, const std::vector<int64_t>& ranks) {
      for (unsigned round = 0; round < 2; ++round) {
        if (!AllSay(WithoutRank3(group, ranks, late), "waits for rank 3")) return false;
        if (!Clean(Run(group, 20, round, ranks))) return false;
      }
      return true;
    };
    TwoProcesses processes([&](Group& group) { return both(group, {1, 3}); });
    CHECK(both(processes.group(), {0, 2}));
    CHECK(processes.Join() == 0);
  }
}

TEST(AProcessThatIsKilledInACallIsNamedAtOnce) {
  TwoProcesses processes([](Group& group) {
    if (!Clean(Run(group, 10, 3, {1, 3}))) return false;
    OnRanks({1, 3}, [&](int64_t rank) -> std::string {
      Call call(group, rank, 77, {3, false, false}, milliseconds(20000));
      if (rank == 3) kill(getpid(), SIGKILL);
      return Exchange(call, 0, {3, false});
    });
    return true;
  });
  CHECK(Clean(Run(processes.group(), 10, 3, {0, 2})));
  auto begin = std::chrono::steady_clock::now();
  for (int64_t run : {77, 78}) {  // nobody can recover without the process
    auto said = OnRanks({0, 2}, [&](int64_t rank) -> std::string {
      Call call(processes.group(), rank, run, {3, false, false}, milliseconds(20000));
      return Exchange(call, 0, {3, false});
    });
    CHECK(AllSay(said, "has ended; start all processes of the group again"));
  }
  CHECK(std::chrono::steady_clock::now() - begin < milliseconds(5000));
  CHECK(processes.Join() == -SIGKILL);
}

TEST(WhatARankDidInTimeCounts) {
  const std::string name = "/k3jax-test-" + std::to_string(getpid());
  auto segment = Segment::Create(name, Executions::NumBytes());
  Executions executions(*segment, 2, true);
  segment->Claim({0});
  pid_t child = fork();
  if (child == 0) {
    Segment::Open(name, Executions::NumBytes()).release()->Claim({1});
    _exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  Segment::Unlink(name);
  const Deadline passed(milliseconds(0)), far(milliseconds(20000));
  for (const auto& [other, deadline] : {std::pair{1, far}, std::pair{0, passed}}) {
    int looks = 0;  // it has come about, but is seen only when there is cause to give up
    executions.Await(0, 1, other, deadline, [&] { return ++looks > 64; });
    CHECK(looks > 64);
  }
  CHECK_THROWS(executions.Await(0, 1, 1, far, [] { return false; }), "rank 1 has ended");
  CHECK_THROWS(executions.Await(0, 2, 0, passed, [] { return false; }), "gave up after 0 ms");
}

TEST(ARankLivesInOneProcess) {
  const std::string name = "/k3jax-test-" + std::to_string(getpid());
  auto segment = Segment::Create(name, 4096);
  segment->Claim({0, 2});
  pid_t child = fork();
  if (child == 0) {
    auto opened = Segment::Open(name, 4096);
    opened->Claim({1});
    CHECK_THROWS(opened->Claim({2}), "claiming rank 2, which another process has");
    CHECK(!opened->Abandoned(0));
    CHECK(opened->Abandoned(3));
    _exit(testing::failed_checks == 0 ? 0 : 1);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_THROWS(Segment::Create(name, 4096), "creating shared memory", name.c_str());
  for (size_t other : {4095, 8192}) {
    CHECK_THROWS(Segment::Open(name, other), "4096 bytes, wanted", "same release");
  }
  Segment::Unlink(name);
  CHECK_THROWS(Segment::Open(name, 4096), "opening shared memory", name.c_str());
}

}  // namespace
}  // namespace k3jax::tail

int main() { return k3jax::testing::RunTests(); }
