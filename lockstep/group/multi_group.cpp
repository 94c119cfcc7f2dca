// Groups that hand on what they are asked: several back ends as one group, and the handle of a non-member.
#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/groups.h"

namespace lockstep::internal {
namespace {

class MultiGroup final : public GroupBase {
 public:
  MultiGroup(GroupIdentity identity, std::vector<Group> parts) : GroupBase(std::move(identity)) {
    for (const auto& part : parts) parts_.push_back(resolve(part));
    // What has no tensor to go by (barrier) runs where CPU tensors do.
    main_ = for_device(c10::kCPU);
    if (main_ == nullptr) main_ = parts_.front().get();
  }

  GroupBase* for_device(c10::DeviceType type) noexcept override {
    for (const auto& part : parts_) {
      if (GroupBase* found = part->for_device(type)) return found;
    }
    return nullptr;
  }
  std::string backend() const override { return backend_config(); }
  std::string backend_config() const override {
    std::string text;
    for (const auto& part : parts_) text += (text.empty() ? "" : ",") + part->backend_config();
    return text;
  }
  void abort(const std::string& reason) override {
    for (const auto& part : parts_) part->abort(reason);
  }

  bool checks_calls() const override { return main_->checks_calls(); }
  std::uint64_t run(OperationRequest& request) override { return main_->run(request); }
  Work post(OperationRequest& request, HeldTensors held) override {
    return main_->post(request, std::move(held));
  }
  const comm::Engine* engine() const override { return main_->engine(); }
  std::shared_ptr<comm::Communicator> communicator(const comm::Engine& engine) const override {
    for (const auto& part : parts_) {
      if (auto found = part->communicator(engine)) return found;
    }
    return nullptr;
  }
  std::shared_ptr<void> allocate(std::size_t n_bytes, c10::Device device) override {
    GroupBase* const part = for_device(device.type());
    return part == nullptr ? nullptr : part->allocate(n_bytes, device);
  }
  void close(const std::string& cause) override {
    for (const auto& part : parts_) part->close(cause);
  }

 private:
  std::vector<std::shared_ptr<GroupBase>> parts_;
  GroupBase* main_ = nullptr;
};

class NonMember final : public GroupBase {
 public:
  NonMember()
      : GroupBase({.name = "non-member",
                   .world = nullptr,
                   .rank = -1,
                   .members = {},
                   .store = nullptr,
                   .shared = std::make_shared<GroupShared>(kDefaultGroupTimeout, "a group of other ranks"),
                   .devices = {}}) {}

  GroupBase* for_device(c10::DeviceType) noexcept override { return this; }
  std::string backend() const override { refuse("get_backend"); }
  std::string backend_config() const override { refuse("get_backend_config"); }
  void abort(const std::string&) override {}

  std::uint64_t run(OperationRequest& request) override {
    base::log(LogLevel::kWarn,
              base::cat(request.name, " (called at ", request.where.file_name(), ":", request.where.line(),
                        "): this rank is not a member of the group; nothing was done"));
    return 0;
  }
  Work post(OperationRequest& request, HeldTensors) override {
    run(request);
    return Work();
  }
  const comm::Engine* engine() const override { return nullptr; }
  std::shared_ptr<comm::Communicator> communicator(const comm::Engine&) const override { return nullptr; }
  std::shared_ptr<void> allocate(std::size_t, c10::Device) override { return nullptr; }
  void close(const std::string&) override {}

 private:
  [[noreturn]] static void refuse(const char* what) {
    base::raise(ErrorKind::kUsage, base::cat(what, ": this rank is not a member of the group"));
  }
};

}  // namespace

Group make_multi_group(GroupIdentity identity, std::vector<Group> parts) {
  return std::make_shared<MultiGroup>(std::move(identity), std::move(parts));
}

}  // namespace lockstep::internal

namespace lockstep {

Group non_member_group() {
  // Leaked on purpose: handles may outlive static objects.
  static const Group& handle = *new Group(std::make_shared<internal::NonMember>());
  return handle;
}

bool is_group_member(const Group& group) noexcept {
  return group == nullptr || group->rank() >= 0;
}

}  // namespace lockstep
