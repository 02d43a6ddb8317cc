// Host memory of one group of ranks, in one process or shared by several on one machine.

#ifndef K3JAX_FFI_TAIL_SEGMENT_H_
#define K3JAX_FFI_TAIL_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace k3jax::tail {

// Zeros at first. Every method may be called from several threads at once.
class Segment {
 public:
  // Of this process alone.
  static std::unique_ptr<Segment> Private(size_t num_bytes);

  // POSIX shared memory, named like "/name"; throws a Failure if there is some of that name.
  static std::unique_ptr<Segment> Create(const std::string& name, size_t num_bytes);

  // What another process has created.
  static std::unique_ptr<Segment> Open(const std::string& name, size_t num_bytes);

  // Takes the name away from created memory; who has opened it keeps it.
  static void Unlink(const std::string& name);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* data() const { return data_; }

  // Says that ranks live in this process, until it ends in whatever way. Once, before they run.
  void Claim(const std::vector<int64_t>& ranks);

  // Whether a rank was claimed by another process that has ended.
  bool Abandoned(int64_t rank) const;

 private:
  Segment(int file, size_t num_bytes);

  const int file_;  // -1 if private
  const size_t num_bytes_;
  char* data_;
  std::vector<int64_t> own_ranks_;
};

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_SEGMENT_H_
