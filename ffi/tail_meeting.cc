#include "tail_meeting.h"

#include <thread>

#include "failure.h"
#include "tail_layout.h"

namespace k3jax::tail {

// What one rank tells the others. Who has come n times may see another one come n + 1 times, but
// not more often, so two programs are kept.
struct Meeting::Arrivals {
  struct Program {
    uint64_t digest;
    char name[56];
  };

  int64_t count;
  Program programs[2];
};

Meeting::Meeting(Segment& segment, size_t offset, int64_t ranks, const std::vector<int64_t>& own)
    : segment_(segment),
      arrivals_(reinterpret_cast<Arrivals*>(segment.data() + offset)),
      elsewhere_(ranks, true) {
  for (int64_t rank : own) elsewhere_[rank] = false;
}

size_t Meeting::NumBytes() { return kMaxRanks * sizeof(Arrivals); }

void Meeting::Attend(int64_t rank, const ProgramId& program, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  Arrivals& own = arrivals_[rank];
  const int64_t count = own.count + 1;
  Arrivals::Program& brought = own.programs[count % 2];
  brought.digest = program.digest;
  brought.name[program.name.copy(brought.name, sizeof(brought.name) - 1)] = 0;
  __atomic_store_n(&own.count, count, __ATOMIC_RELEASE);
  auto fail = [&](const std::string& reason) {
    __atomic_store_n(&own.count, count - 1, __ATOMIC_RELEASE);
    throw Failure(
        FailureKind::kFailedPrecondition,
        Concat("rank ", rank, " of the fused tail may not run '", program.name, "': ", reason));
  };
  for (size_t other = 0; other < elsewhere_.size(); ++other) {
    if (!elsewhere_[other]) continue;
    while (__atomic_load_n(&arrivals_[other].count, __ATOMIC_ACQUIRE) < count) {
      if (segment_.Abandoned(other)) {
        fail(Concat("the process of rank ", other, " has ended; start all processes again"));
      }
      if (std::chrono::steady_clock::now() > deadline) {
        fail(Concat("rank ", other, " did not come to its first run within ", patience.count(),
                    " ms. All processes must run the same programs in the same order"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    const Arrivals::Program& theirs = arrivals_[other].programs[count % 2];
    if (theirs.digest == brought.digest) continue;
    // The count stays: the others shall see the difference too.
    throw Failure(FailureKind::kInvalidArgument,
                  Concat("ranks of the fused tail bring different programs: rank ", rank, " has '",
                         brought.name, "', rank ", other, " has '", theirs.name,
                         "'. All processes must run the same program, on arrays of the same "
                         "shapes"));
  }
}

}  // namespace k3jax::tail
