#include "lockstep/net/secret.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

class SecretFile : public testing::Test {
 protected:
  SecretFile() {
    char name[] = "/tmp/lockstep-secret-XXXXXX";
    folder_ = ::mkdtemp(name);
    path_ = base::cat(folder_, "/secret");
  }
  ~SecretFile() override {
    for (const base::EnvVar var : {base::EnvVar::kLockstepSecretFd, base::EnvVar::kLockstepSecretFile})
      ::unsetenv(name_of(var));
    std::filesystem::remove_all(folder_);
  }

  std::string refusal() {
    try {
      JobSecret::from_file(path_);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    ADD_FAILURE() << "accepted";
    return "";
  }

  std::string folder_;
  std::string path_;
};

TEST(JobSecret, EveryMintedOneIsDifferent) {
  const JobSecret a = JobSecret::mint();
  EXPECT_EQ(a.bytes().size(), 32u);
  EXPECT_EQ(a, JobSecret(a));
  EXPECT_FALSE(a == JobSecret::mint());
}

TEST(JobSecret, AMemfdCanBeReadAgainAndAgain) {
  const JobSecret secret = JobSecret::mint();
  const base::Fd fd = secret.to_memfd();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(JobSecret::from_fd(fd.get()), secret);
  const char byte = '0';
  EXPECT_EQ(::pwrite(fd.get(), &byte, 1, 0), -1) << "nobody can change it under the others";
}

TEST(JobSecret, APipeIsRefusedSinceOnlyOneRankCouldReadIt) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const base::Fd in(ends[0]), out(ends[1]);
  EXPECT_THROW(JobSecret::from_fd(in.get()), Error);
  EXPECT_THROW(JobSecret::from_fd(-1), Error);
}

TEST_F(SecretFile, WhatIsWrittenIsReadBack) {
  const JobSecret secret = JobSecret::mint();
  secret.write_file(path_);
  EXPECT_EQ(JobSecret::from_file(path_), secret);
  ::chmod(path_.c_str(), 0400);
  EXPECT_EQ(JobSecret::from_file(path_), secret);
  EXPECT_THROW(secret.write_file(path_), Error) << "an existing file is never overwritten";
}

TEST_F(SecretFile, AnyOtherModeIsRefused) {
  JobSecret::mint().write_file(path_);
  for (const mode_t mode : {0640, 0604, 0644, 0660, 0700, 0777, 0601}) {
    ::chmod(path_.c_str(), mode);
    EXPECT_NE(refusal().find("mode"), std::string::npos);
  }
}

TEST_F(SecretFile, AFileOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  JobSecret::mint().write_file(path_);
  ASSERT_EQ(::chown(path_.c_str(), 12345, 0), 0);
  EXPECT_NE(refusal().find("12345"), std::string::npos);
}

TEST_F(SecretFile, AMissingFileShowsTheLineThatMakesOneAndTheLineWorks) {
  const std::string text = refusal();
  const std::string hint = JobSecret::make_file_hint(path_);
  ASSERT_NE(text.find(hint), std::string::npos) << text;
  const std::string line = hint.substr(hint.find('('));
  ASSERT_EQ(std::system(line.c_str()), 0);
  JobSecret::from_file(path_);
}

TEST_F(SecretFile, WrongContentsAreRefusedAndNotShown) {
  const std::string good(64, 'a');
  for (const std::string& text :
       {std::string(), good.substr(1), good + "a", std::string(63, 'a') + "g", good + "\nx"}) {
    std::filesystem::remove(path_);
    const base::Fd file(::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::write(file.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    const std::string said = refusal();
    if (!text.empty()) {
      EXPECT_EQ(said.find(text.substr(0, 60)), std::string::npos) << said;
    }
  }
}

TEST_F(SecretFile, AFolderOrPipeIsRefusedWithoutWaiting) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_NE(refusal().find("plain file"), std::string::npos);
}

TEST_F(SecretFile, TheEnvironmentPrefersTheDescriptor) {
  EXPECT_FALSE(JobSecret::from_environment());
  const JobSecret in_file = JobSecret::mint();
  const JobSecret in_fd = JobSecret::mint();
  in_file.write_file(path_);
  ::setenv(name_of(base::EnvVar::kLockstepSecretFile), path_.c_str(), 1);
  EXPECT_EQ(*JobSecret::from_environment(), in_file);
  const base::Fd fd = in_fd.to_memfd();
  ::setenv(name_of(base::EnvVar::kLockstepSecretFd), base::cat(fd.get()).c_str(), 1);
  EXPECT_EQ(*JobSecret::from_environment(), in_fd);
}

}  // namespace
}  // namespace lockstep
