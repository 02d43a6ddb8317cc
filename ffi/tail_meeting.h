// Where the ranks of several processes meet before each runs a program for the first time.
//
// One process may compile for a minute longer than another. A kernel that waited for it would give
// up, and one of another program would exchange words that are not meant for it.

#ifndef K3JAX_FFI_TAIL_MEETING_H_
#define K3JAX_FFI_TAIL_MEETING_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tail_segment.h"
#include "workspace.h"

namespace k3jax::tail {

class Meeting {
 public:
  // `own` are the ranks of this process; the segment has NumBytes from `offset` on.
  Meeting(Segment& segment, size_t offset, int64_t ranks, const std::vector<int64_t>& own);

  static size_t NumBytes();

  // Waits until every rank of another process has come as often as this one. Throws a Failure if
  // one brings another program, does not come in time, or has ended; then this did not count.
  void Attend(int64_t rank, const ProgramId& program, std::chrono::milliseconds patience);

 private:
  struct Arrivals;

  Segment& segment_;
  Arrivals* const arrivals_;  // one a rank
  std::vector<bool> elsewhere_;
};

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_MEETING_H_
