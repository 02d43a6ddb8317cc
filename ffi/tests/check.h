// A test harness of forty lines: TEST(name) { CHECK(...); } and RunTests(argc, argv) in main.

#ifndef K3JAX_FFI_TESTS_CHECK_H_
#define K3JAX_FFI_TESTS_CHECK_H_

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace k3jax::testing {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& Cases() {
  static std::vector<Case> cases;
  return cases;
}

inline int failed_checks = 0;

inline void Report(const char* file, int line, const std::string& what) {
  std::printf("%s:%d: %s\n", file, line, what.c_str());
  ++failed_checks;
}

struct Registration {
  Registration(const char* name, void (*body)()) { Cases().push_back({name, body}); }
};

inline int RunTests() {
  int failed_tests = 0;
  for (const Case& test : Cases()) {
    failed_checks = 0;
    try {
      test.body();
    } catch (const std::exception& error) {
      Report(test.name, 0, std::string("threw: ") + error.what());
    }
    std::printf("%s %s\n", failed_checks ? "FAIL" : "ok  ", test.name);
    failed_tests += failed_checks != 0;
  }
  std::printf("%zu passed, %d failed\n", Cases().size() - failed_tests, failed_tests);
  return failed_tests != 0 || Cases().empty();
}

}  // namespace k3jax::testing

#define TEST(name)                                                  \
  static void name();                                               \
  static k3jax::testing::Registration register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) k3jax::testing::Report(__FILE__, __LINE__, "not: " #condition); \
  } while (false)

// The expression throws, and its message holds each of the given pieces.
#define CHECK_THROWS(expression, ...)                                                   \
  do {                                                                                  \
    std::string message;                                                                \
    try {                                                                               \
      expression;                                                                       \
    } catch (const std::exception& error) {                                             \
      message = error.what();                                                           \
    }                                                                                   \
    for (const char* piece : {__VA_ARGS__}) {                                           \
      if (message.find(piece) == std::string::npos) {                                   \
        k3jax::testing::Report(__FILE__, __LINE__,                                      \
                               std::string("no '") + piece + "' in '" + message + "'"); \
      }                                                                                 \
    }                                                                                   \
  } while (false)

#endif  // K3JAX_FFI_TESTS_CHECK_H_
