// The one exception type of this library: a sentence that names what failed and what to do.
//
// Code below the FFI boundary throws; handler.cc and topology.cc turn it into an ffi::Error or a C
// string, so no exception ever leaves the library.

#ifndef K3JAX_FFI_FAILURE_H_
#define K3JAX_FFI_FAILURE_H_

#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

namespace k3jax {

enum class FailureKind : int {
  kInvalidArgument,
  kFailedPrecondition,
  kDeadlineExceeded,
  kUnavailable,
  kResourceExhausted,
  kInternal
};

class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, const std::string& message)
      : std::runtime_error(message), kind_(kind) {}
  FailureKind kind() const { return kind_; }

 private:
  FailureKind kind_;
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// For C functions: runs `body` and returns null, or what it threw as a sentence, which lives until
// the same thread calls Guard again.
template <typename Body>
const char* Guard(Body body) {
  thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace k3jax

#endif  // K3JAX_FFI_FAILURE_H_
