// The parser: every malformed program is refused by name, before any device is touched.

#include "../program.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace k3jax {
namespace {

const std::string kCubins = "\177ELFone:2;\177ELFtwo:0;";

// Two kernels, three launches; every field differs from its neighbours.
// clang-format off
std::vector<int64_t> Words() {
  return {
      1, 2, 1, 2, 3,                              // version, operands, results, kernels, launches
      0, 10, 128, 2, 1, 1, 4096,                  // kernel one
      10, 10, 256, 1, 1, 1, 0,                    // kernel two
      0, 4, 1, 1, 0, 2, 0, 1, 64, 1, 0, 32,       // operand 1 + 64, result 0 + 32
      1, 7, 2, 3, 1, 3, 2, -5, 0, 3, 1065353216, 0, 4, 3, 16,  // int32, float32, workspace 3 + 16
      1, 1, 1, 1, 0, 0,                           // no arguments
  };
}
// clang-format on

ProgramSpec Parse(const std::vector<int64_t>& words, const std::string& cubins = kCubins,
                  const std::string& entries = "one\ntwo") {
  return ParseProgram("sample", "sm_90a", entries, cubins, words.data(), words.size());
}

TEST(ReadsEveryField) {
  ProgramSpec program = Parse(Words());
  CHECK(program.name == "sample" && program.arch == "sm_90a");
  CHECK(program.num_operands == 2 && program.num_results == 1);
  CHECK(program.kernels.size() == 2 && program.launches.size() == 3);
  CHECK(program.kernels[0].entry == "one" && program.kernels[1].entry == "two");
  CHECK(program.kernels[0].cubin == kCubins.substr(0, 10));
  CHECK(program.kernels[1].cubin == kCubins.substr(10));
  CHECK(program.kernels[0].threads == 128 && program.kernels[0].cluster[0] == 2);
  CHECK(program.kernels[0].shared_bytes == 4096);
  const LaunchSpec& second = program.launches[1];
  CHECK(second.kernel == 1 && second.overlaps_previous && !program.launches[0].overlaps_previous);
  CHECK(second.grid[0] == 7 && second.grid[1] == 2 && second.grid[2] == 3);
  CHECK(second.arguments[0].kind == ArgumentKind::kInt32 && second.arguments[0].value == -5);
  CHECK(second.arguments[1].kind == ArgumentKind::kFloat32);
  CHECK(second.arguments[2].kind == ArgumentKind::kWorkspace);
  CHECK(second.arguments[2].value == 3 && second.arguments[2].offset == 16);
}

TEST(RefusesEachWordOutOfRange) {
  struct Bad {
    size_t word;
    int64_t value;
    const char* message;
  };
  const Bad bad[] = {
      {0, 2, "format version 2"}, {1, 65, "operands 65"},      {3, 1, "kernels 1"},
      {4, 0, "launches 0"},       {5, -1, "first cubin byte"}, {6, 1000, "cubin bytes 1000"},
      {7, 1025, "threads 1025"},  {8, 17, "cluster 17"},       {19, 2, "kernel 2"},
      {20, 5, "not a multiple"},  {21, 65536, "grid 65536"},   {23, 2, "overlap flag 2"},
      {24, 65, "arguments 65"},   {25, 5, "argument kind 5"},  {26, 2, "operand 2"},
      {27, -1, "offset -1"},      {29, 1, "result 1"},         {38, 1LL << 31, "argument value"},
  };
  for (const Bad& change : bad) {
    std::vector<int64_t> words = Words();
    words[change.word] = change.value;
    CHECK_THROWS(Parse(words), "k3jax program 'sample'", change.message);
  }
}

TEST(RefusesForeignImagesAndLengths) {
  CHECK_THROWS(Parse(Words(), "MZ" + kCubins.substr(2)), "not an ELF image");
  CHECK_THROWS(Parse(Words(), kCubins, "one"), "kernels 2");
  std::vector<int64_t> longer = Words();
  longer.push_back(0);
  CHECK_THROWS(Parse(longer), "1 words too many");
  for (size_t size = 0; size < Words().size(); ++size) {
    std::vector<int64_t> shorter = Words();
    shorter.resize(size);
    CHECK_THROWS(Parse(shorter), "sample");
  }
}

TEST(NeverCrashesOnRandomWords) {
  std::mt19937_64 random(std::random_device{}());
  for (int round = 0; round < 20000; ++round) {
    std::vector<int64_t> words = Words();
    for (int change = 0; change < 3; ++change) {
      words[random() % words.size()] = int64_t(random()) >> (random() % 64);
    }
    try {
      ProgramSpec program = Parse(words);
      CHECK(program.kernels.size() == 2);
    } catch (const std::exception&) {
    }
  }
}

}  // namespace
}  // namespace k3jax

int main() { return k3jax::testing::RunTests(); }
