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

// Two kernels, two kept memories, three launches; every field differs from its neighbours.
// clang-format off
std::vector<int64_t> Words() {
  return {
      2, 2, 1, 2, 3, 2,                           // header: 2 operands, 1 result, 2 kernels, ...
      0, 10, 128, 2, 1, 1, 4096,                  // kernel one
      10, 10, 256, 1, 1, 1, 0,                    // kernel two
      512, 7, 2048, 4294967295,                   // kept memories: bytes and fill
      0, 4, 1, 1, 0, 2, 0, 1, 64, 1, 0, 32,       // operand 1 + 64, result 0 + 32
      1, 7, 2, 3, 1, 3, 2, -5, 0, 3, 1065353216, 0, 4, 3, 16,  // int32, float32, workspace 3 + 16
      1, 1, 1, 1, 0, 1, 5, 1, 2048,               // the end of kept memory 1
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
  CHECK(program.kept.size() == 2);
  CHECK(program.kept[0].num_bytes == 512 && program.kept[0].fill == 7);
  CHECK(program.kept[1].num_bytes == 2048 && program.kept[1].fill == 0xffffffff);
  const Argument& kept = program.launches[2].arguments[0];
  CHECK(kept.kind == ArgumentKind::kKept && kept.value == 1 && kept.offset == 2048);
}

TEST(RefusesEachWordOutOfRange) {
  struct Bad {
    size_t word;
    int64_t value;
    const char* message;
  };
  const Bad bad[] = {
      {0, 1, "format version 1"},
      {1, 65, "operands 65"},
      {3, 1, "kernels 1"},
      {4, 0, "launches 0"},
      {5, 65, "kept memories 65"},
      {6, -1, "first cubin byte"},
      {7, 1000, "cubin bytes 1000"},
      {8, 1025, "threads 1025"},
      {9, 17, "cluster 17"},
      {20, 0, "kept bytes 0"},
      {20, (1LL << 30) + 4, "kept bytes 1073741828"},
      {20, 510, "keeps 510 bytes, not a multiple of 4"},
      {21, -1, "kept fill -1"},
      {23, 1LL << 32, "kept fill 4294967296"},
      {24, 2, "kernel 2"},
      {25, 5, "not a multiple"},
      {26, 65536, "grid 65536"},
      {28, 1, "keeps memory but starts with a launch that overlaps the one before"},
      {28, 2, "overlap flag 2"},
      {29, 65, "arguments 65"},
      {30, 6, "argument kind 6"},
      {31, 2, "operand 2"},
      {32, -1, "offset -1"},
      {34, 1, "result 1"},
      {43, 1LL << 31, "argument value"},
      {58, 2, "kept memory 2"},
      {58, -1, "kept memory -1"},
      {59, 2049, "offset 2049"},
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
