#include "shared_choices.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace te_compile {
namespace {

// Some 4000 choices. Beyond it nothing is written or read.
constexpr off_t kMostBytes = off_t{1} << 20;
constexpr size_t kDigits = 16;  // of a word of an answer

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (descriptor_ >= 0 && fstat(descriptor_, &status_) != 0) status_ = {};
  }
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  explicit operator bool() const { return descriptor_ >= 0 && S_ISREG(status_.st_mode); }
  int descriptor() const { return descriptor_; }
  off_t size() const { return status_.st_size; }
  ino_t number() const { return status_.st_ino; }

 private:
  const int descriptor_;
  struct stat status_ = {};
};

std::string line_of(const Question& question, const Answer& answer) {
  std::string line;
  for (const int64_t word : question) line += std::to_string(word) + ' ';
  for (const uint64_t word : answer) {
    char digits[kDigits];
    const auto end = std::to_chars(digits, digits + kDigits, word, 16).ptr;
    line.append(static_cast<size_t>(digits + kDigits - end), '0').append(digits, end);
  }
  return line + '\n';
}

template <typename T>
bool read_number(std::string_view text, int base, T& number) {
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number, base);
  return error == std::errc() && stopped == end;
}

/// What `line_of` made a line of; nothing if it made none like it.
std::optional<std::pair<Question, Answer>> choice_of(std::string_view line) {
  std::pair<Question, Answer> choice;
  auto& [question, answer] = choice;
  for (size_t space = line.find(' '); space != line.npos; space = line.find(' ')) {
    if (!read_number(line.substr(0, space), 10, question.emplace_back())) return std::nullopt;
    line.remove_prefix(space + 1);
  }
  if (line.size() != answer.size() * kDigits) return std::nullopt;
  for (uint64_t& word : answer) {
    if (!read_number(line.substr(0, kDigits), 16, word)) return std::nullopt;
    line.remove_prefix(kDigits);
  }
  return choice;
}

}  // namespace

std::vector<Answer> SharedChoices::find(const Question& question) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = answers_.find(question);
  if (found != answers_.end()) return found->second;
  read_on();
  const auto read = answers_.find(question);
  return read == answers_.end() ? std::vector<Answer>() : read->second;
}

std::vector<Answer> SharedChoices::add(const Question& question, const Answer& answer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  append(line_of(question, answer));
  read_on();
  insert(question, answer);  // which the file brought by now, if it took it
  return answers_[question];
}

/// Read the whole lines that were appended since the last time.
void SharedChoices::read_on() {
  const File file(path_, O_RDONLY);
  if (!file) return;
  if (file.number() != file_ || file.size() < read_) {  // it was deleted, and there is a new one
    file_ = file.number();
    read_ = 0;
  }
  const off_t end = std::min(file.size(), kMostBytes);
  if (end <= read_) return;
  std::string text(static_cast<size_t>(end - read_), '\0');
  const ssize_t got = pread(file.descriptor(), text.data(), text.size(), read_);
  if (got <= 0) return;
  std::string_view rest(text.data(), static_cast<size_t>(got));
  for (size_t end_of_line = rest.find('\n'); end_of_line != rest.npos; end_of_line = rest.find('\n')) {
    if (const auto choice = choice_of(rest.substr(0, end_of_line))) insert(choice->first, choice->second);
    rest.remove_prefix(end_of_line + 1);
    read_ += static_cast<off_t>(end_of_line + 1);
  }
}

/// One write, so that lines of several processes do not mix.
void SharedChoices::append(std::string line) const {
  const File file(path_, O_RDWR | O_APPEND | O_CREAT);
  if (!file || file.size() + static_cast<off_t>(line.size()) > kMostBytes) return;
  char last = '\n';
  if (file.size() > 0 && pread(file.descriptor(), &last, 1, file.size() - 1) == 1 && last != '\n') {
    line.insert(line.begin(), '\n');  // somebody's disk was full in the middle of a line
  }
  if (write(file.descriptor(), line.data(), line.size()) < 0) return;  // then this process remembers it alone
}

void SharedChoices::insert(const Question& question, const Answer& answer) {
  std::vector<Answer>& answers = answers_[question];
  if (std::find(answers.begin(), answers.end(), answer) == answers.end()) answers.push_back(answer);
}

}  // namespace te_compile
