// Processes that meet before a program's first run.

#include "../tail_meeting.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace k3jax::tail {
namespace {

using std::chrono::milliseconds;

const ProgramId kTail8{"tail_8", 8}, kTail5{"tail_5", 5};

// A meeting and the segment under it.
struct Place {
  std::unique_ptr<Segment> segment;
  std::unique_ptr<Meeting> meeting;

  Place(std::unique_ptr<Segment> shared, const std::vector<int64_t>& own)
      : segment(std::move(shared)) {
    segment->Claim(own);
    meeting = std::make_unique<Meeting>(*segment, 0, 2, own);
  }
  Meeting* operator->() const { return meeting.get(); }
};

// Rank 0 of two here; rank 1 in a child, which does `in_child(meeting)`.
template <typename Body>
pid_t Fork(std::unique_ptr<Place>& place, Body in_child) {
  const std::string name = "/k3jax-meeting-" + std::to_string(getpid());
  place =
      std::make_unique<Place>(Segment::Create(name, Meeting::NumBytes()), std::vector<int64_t>{0});
  pid_t child = fork();
  if (child == 0) {
    Place other(Segment::Open(name, Meeting::NumBytes()), {1});
    kill(getpid(), SIGSTOP);
    in_child(*other.meeting);
    _exit(testing::failed_checks == 0 ? 0 : 1);
  }
  int status;
  waitpid(child, &status, WUNTRACED);
  Segment::Unlink(name);
  kill(child, SIGCONT);
  return child;
}

void CheckEnded(pid_t child) {
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(TheFasterOneWaits) {
  std::unique_ptr<Place> place;
  pid_t child = Fork(place, [](Meeting& other) {
    std::this_thread::sleep_for(milliseconds(1000));
    for (int i = 0; i < 500; ++i) other.Attend(1, i % 3 ? kTail8 : kTail5, milliseconds(20000));
  });
  auto begin = std::chrono::steady_clock::now();
  (*place)->Attend(0, kTail5, milliseconds(20000));
  CHECK(std::chrono::steady_clock::now() - begin > milliseconds(100));
  for (int i = 1; i < 500; ++i) (*place)->Attend(0, i % 3 ? kTail8 : kTail5, milliseconds(20000));
  CheckEnded(child);
}

TEST(AnotherProgramIsNamedOnBoth) {
  std::unique_ptr<Place> place;
  pid_t child = Fork(place, [](Meeting& other) {
    CHECK_THROWS(other.Attend(1, kTail5, milliseconds(20000)), "rank 1 has 'tail_5'",
                 "rank 0 has 'tail_8'");
  });
  CHECK_THROWS((*place)->Attend(0, kTail8, milliseconds(20000)), "rank 0 has 'tail_8'",
               "rank 1 has 'tail_5'", "same shapes");
  CheckEnded(child);
}

TEST(WhoDoesNotComeIsNamedAndTheNextAttemptCounts) {
  std::unique_ptr<Place> place;
  pid_t child = Fork(place, [](Meeting& other) {
    std::this_thread::sleep_for(milliseconds(1500));
    other.Attend(1, kTail8, milliseconds(20000));
  });
  CHECK_THROWS((*place)->Attend(0, kTail8, milliseconds(50)), "may not run 'tail_8'",
               "rank 1 did not come", "50 ms");
  (*place)->Attend(0, kTail8, milliseconds(20000));
  CheckEnded(child);
}

TEST(AnEndedProcessIsNamedAtOnce) {
  std::unique_ptr<Place> place;
  pid_t child = Fork(place, [](Meeting&) { kill(getpid(), SIGKILL); });
  CHECK_THROWS((*place)->Attend(0, kTail8, milliseconds(20000)), "the process of rank 1 has ended");
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status));
}

}  // namespace
}  // namespace k3jax::tail

int main() { return k3jax::testing::RunTests(); }
