// Choices that all processes make alike, remembered in memory and in a file.
//
// A question is a list of integers, an answer eight words. Who finds no answer works one out and adds it. What was
// worked out by several processes at once is settled by the file: each appends its own answer, then reads, and the first
// one in the file is everybody's. So nobody waits for anybody, which processes that wait for each other on a GPU must
// not, and after `add` all go the same way.
//
// The file is text, a line a choice: the question in decimal, then the answer in 128 hexadecimal digits. A line that is
// anything else is skipped. A file that cannot be read or written is as good as none: answers are then the process's own.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace te_compile {

using Question = std::vector<int64_t>;
using Answer = std::array<uint64_t, 8>;

class SharedChoices {
 public:
  explicit SharedChoices(std::string path) : path_(std::move(path)) {}

  /// The answers to a question, the first one first. There are several if users had no use for those before theirs.
  std::vector<Answer> find(const Question& question);

  /// The answers to a question, of which this one was worked out here.
  std::vector<Answer> add(const Question& question, const Answer& answer);

 private:
  void read_on();
  void append(std::string line) const;
  void insert(const Question& question, const Answer& answer);

  const std::string path_;
  std::mutex mutex_;  // guards what follows
  std::map<Question, std::vector<Answer>> answers_;
  ino_t file_ = 0;  // which one was read, and how much of it
  off_t read_ = 0;
};

}  // namespace te_compile
