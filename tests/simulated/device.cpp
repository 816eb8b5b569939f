// An accelerator in host memory, by torch's interface for devices of other packages (PrivateUse1).
//
// It keeps the order of streams as CUDA does: a stream is a thread that does its work in order; an operation that
// writes to existing tensors, and a copy between the device and pinned memory that may not block, return before they are
// done; memory that is freed is overwritten in the order of the stream that it was allocated on, at the next allocation
// there, which is when torch's allocator for CUDA may use it again. An operation that returns new tensors waits for the
// current stream, and for no other. So a program that lacks a wait for another stream, or for a copy, reads other bytes.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr size_t kMemoryBytes = size_t{2} << 30;  // of one device
constexpr int kFreed = 0xFF;                      // a NaN in every floating-point type

std::atomic<int64_t> host_waits{0};  // for a number, a size, a copy from or to the host, an event or a stream

using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

// ---- Streams: threads that do their work in order ----

class Queue {
 public:
  Queue() {
    std::thread([this] { run(); }).detach();
  }

  void add(Work work) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
    ++added_;
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == added_;
  }

  // Wait for the work that is in the queue now, and raise the error of an operation that failed.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto last = added_;
    changed_.wait(lock, [&] { return done_ >= last; });
    TORCH_CHECK(error_.empty(), "an operation of a simulated device failed: ", std::exchange(error_, ""));
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      auto work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      std::string error;
      try {
        work();
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      work = nullptr;  // gives up the memory that it holds
      lock.lock();
      ++done_;
      if (error_.empty()) error_ = error;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> waiting_;
  uint64_t added_ = 0, done_ = 0;
  std::string error_;
};

class Streams {
 public:
  Queue& queue(c10::Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& found = queues_[{stream.device_index(), stream.id()}];
    if (!found) found = std::make_unique<Queue>();
    return *found;
  }

  c10::Stream make(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), ++last_);
  }

  void wait_all(c10::DeviceIndex device) {
    std::vector<Queue*> found;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [place, queue] : queues_)
        if (place.first == device) found.push_back(queue.get());
    }
    for (auto* queue : found) queue->wait();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>> queues_;
  c10::StreamId last_ = 0;
};

Streams& streams() {
  static auto* found = new Streams;  // never destroyed: its threads run until the process ends
  return *found;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), current_streams.at(device));
}

Queue& current_queue() { return streams().queue(current_stream(current_device)); }

// ---- Events ----

class Event {
 public:
  void record(Queue& queue, const std::shared_ptr<Event>& self) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto version = ++recorded_;
    lock.unlock();
    queue.add([self, version] {
      std::lock_guard<std::mutex> inner(self->mutex_);
      self->reached_ = std::max(self->reached_, version);
      self->time_ = Clock::now();
      self->changed_.notify_all();
    });
  }

  uint64_t recorded() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }

  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_ == recorded_;
  }

  void wait(uint64_t version) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= version; });
  }

  Clock::time_point time() {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, reached_ = 0;
  Clock::time_point time_;
};

using Handle = std::shared_ptr<Event>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(0 <= device.index() && device.index() < kDevices, "there is no simulated device ", device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return streams().make(device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return streams().make(device.index() < 0 ? current_device : device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return streams().queue(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++host_waits;
    streams().queue(stream).wait();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    ++host_waits;
    streams().wait_all(device < 0 ? current_device : device);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Handle*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Handle(std::make_shared<Event>());
    const auto& handle = *static_cast<Handle*>(*event);
    handle->record(streams().queue(stream), handle);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto handle = *static_cast<Handle*>(event);
    streams().queue(stream).add([handle, version = handle->recorded()] { handle->wait(version); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<Handle*>(event))->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto& handle = *static_cast<Handle*>(event);
    if (!handle->is_reached()) ++host_waits;
    handle->wait(handle->recorded());
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto passed = (*static_cast<Handle*>(end))->time() - (*static_cast<Handle*>(begin))->time();
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Memory of a device: freed memory is overwritten at the next allocation on its stream, and used again ----

struct Block {
  void* address;
  size_t bytes;
  c10::Stream stream;                 // the one that was current when it was allocated
  std::vector<c10::Stream> others{};  // those that also use it: `Tensor.record_stream`
};

class Memory {
 public:
  Block* take(size_t bytes, c10::DeviceIndex device) {
    const auto rounded = (bytes + 511) / 512 * 512;
    const auto stream = current_stream(device);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto freed = std::exchange(freed_[{device, stream.id()}], {});
    lock.unlock();
    for (auto* block : freed) streams().queue(stream).add([this, block] { overwrite(block); });
    lock.lock();
    used_.at(device) += rounded;
    if (used_.at(device) > kMemoryBytes) {
      used_.at(device) -= rounded;
      lock.unlock();
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "simulated device ", int(device), " out of memory. Tried to allocate ", bytes, " B");
    }
    peak_.at(device) = std::max(peak_.at(device), used_.at(device));
    auto& kept = free_[rounded];
    void* address = nullptr;
    if (kept.empty()) {
      TORCH_CHECK(posix_memalign(&address, 512, rounded) == 0, "the host has no memory for a simulated device");
    } else {
      address = kept.back();
      kept.pop_back();
    }
    return new Block{address, rounded, stream};
  }

  void give_back(Block* block) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      used_.at(block->stream.device_index()) -= block->bytes;
      if (block->others.empty()) return freed_[{block->stream.device_index(), block->stream.id()}].push_back(block);
    }
    block->others.push_back(block->stream);
    for (const auto& stream : block->others) {  // no stream waits for another by this
      auto last = std::make_shared<Event>();
      last->record(streams().queue(stream), last);
      shared_.add([last] { last->wait(last->recorded()); });
    }
    shared_.add([this, block] { overwrite(block); });
  }

  size_t used(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_.at(device);
  }

  size_t peak(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_.at(device);
  }

  void reset_peak(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_.at(device) = used_.at(device);
  }

 private:
  void overwrite(Block* block) {
    std::memset(block->address, kFreed, block->bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    free_[block->bytes].push_back(block->address);  // stays mapped, so that a late read finds other bytes
    delete block;
  }

  Queue shared_;  // frees what several streams use
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::vector<Block*>> freed_;  // to be overwritten
  std::map<size_t, std::vector<void*>> free_;
  std::array<size_t, kDevices> used_{}, peak_{};
};

Memory& memory() {
  static auto* found = new Memory;
  return *found;
}

void free_block(void* block) { memory().give_back(static_cast<Block*>(block)); }

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    auto* block = memory().take(bytes, current_device);
    return {block->address, block, &free_block, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    current_queue().wait();
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { Guard().recordDataPtrOnStream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    for (auto* each : {&found.allocated_bytes, &found.reserved_bytes, &found.active_bytes, &found.requested_bytes}) {
      each->at(0).current = static_cast<int64_t>(memory().used(device));
      each->at(0).peak = static_cast<int64_t>(memory().peak(device));
    }
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { memory().reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {kMemoryBytes - memory().used(device), kMemoryBytes};
  }
};

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  if (auto* block = static_cast<Block*>(data.get_context())) block->others.push_back(stream);
}

// ---- Pinned memory of the host ----

class PinnedRanges {
 public:
  void add(void* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[address] = bytes;
  }
  bool remove(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ranges_.erase(address) == 1;
  }
  bool contains(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.upper_bound(const_cast<void*>(address));
    if (next == ranges_.begin()) return false;
    --next;
    return static_cast<const char*>(address) < static_cast<const char*>(next->first) + next->second;
  }

 private:
  std::mutex mutex_;
  std::map<void*, size_t> ranges_;
};

PinnedRanges& pinned() {
  static auto* found = new PinnedRanges;
  return *found;
}

void free_pinned(void* address) {
  pinned().remove(address);
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, std::max<size_t>(bytes, 1)) == 0, "the host has no memory");
    pinned().add(address, bytes);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(kType, device)); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(kType, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return pinned().contains(address); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto to = device_allocator.allocate(bytes);
    if (bytes && storage.nbytes()) {
      current_queue().wait();
      std::memcpy(to.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(to));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

std::atomic<double> copy_seconds{0.0};  // what a copy in the background takes longer

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// ---- Operations: those of the CPU, on the same memory ----

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// A tensor of the CPU over the memory of one of the device. It does not hold that memory, as a kernel does not.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto found = at::from_blob(
      tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  return found;
}

at::Tensor empty_like_cpu(const at::Tensor& like) {
  const c10::Device device(kType, current_device);
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device).pinned_memory(false));
}

at::Tensor on_device(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
  auto found = empty_like_cpu(tensor);
  on_cpu(found).copy_(tensor);
  return found;
}

// A number on the host is read when an operation is called, and other memory of the host is refused, as on CUDA.
at::Tensor argument_on_cpu(const at::Tensor& tensor, bool is_written) {
  if (!tensor.defined() || is_ours(tensor)) return on_cpu(tensor);
  TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but found one on the CPU");
  return is_written ? tensor : tensor.clone();
}

c10::IValue converted(const c10::IValue& value, bool is_written) {
  if (value.isTensor()) return argument_on_cpu(value.toTensor(), is_written);
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& each : value.toTensorList()) found.push_back(argument_on_cpu(each, is_written));
    return found;
  }
  if (value.isOptionalTensorList()) {  // indices, which may lie on the host
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      found.push_back(each ? std::optional(is_ours(*each) ? on_cpu(*each) : each->clone()) : each);
    return found;
  }
  return value;
}

c10::IValue result(const c10::IValue& value) {
  if (value.isTensor()) return on_device(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> found;
  for (const at::Tensor& each : value.toTensorList()) found.push_back(on_device(each));
  return found;
}

void find_device(const at::Tensor& tensor, std::optional<c10::Device>& found) {
  if (!is_ours(tensor)) return;
  TORCH_CHECK(
      !found || *found == tensor.device(), "Expected all tensors to be on the same device, but found ", *found, " and ",
      tensor.device());
  found = tensor.device();
}

void find_device(const c10::IValue& value, std::optional<c10::Device>& found) {
  if (value.isTensor()) find_device(value.toTensor(), found);
  if (value.isDevice() && value.toDevice().type() == kType) found = value.toDevice();
  if (value.isTensorList())
    for (const at::Tensor& each : value.toTensorList()) find_device(each, found);
}

// Whether the host waits for an operation of CUDA: for a number that it returns, or for the size of a result.
bool waits(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> values) {
  for (const auto& value : values) {
    if (!value.isOptionalTensorList()) continue;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      if (each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
    return false;  // other indices have the size of the result
  }
  return operation.hasTag(at::Tag::dynamic_output_shape) || operation.hasTag(at::Tag::data_dependent_output);
}

// Whether an argument may be resized, as an empty `out=` is: the operation gets a tensor of its own instead.
bool is_resized(const c10::Argument& argument, const c10::IValue& value) {
  return argument.is_out() && value.isTensor() && value.toTensor().numel() == 0;
}

// Whether every tensor that an operation returns is one of its arguments, so that no size depends on its work.
bool only_writes(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) {
  for (const auto& returned : schema.returns())
    if (returned.alias_info() == nullptr || !returned.alias_info()->isWrite()) return false;
  bool writes = false;
  for (size_t number = 0; number < values.size(); ++number) {
    const auto& argument = schema.arguments()[number];
    if (is_resized(argument, values[number])) return false;
    writes |= argument.alias_info() && argument.alias_info()->isWrite();
  }
  return writes;
}

void call_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void run(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->end() - count;
  std::optional<c10::Device> device;
  for (auto each = begin; each != stack->end(); ++each) find_device(*each, device);
  const c10::OptionalDeviceGuard guard(device);
  const std::vector<c10::IValue> outer(begin, stack->end());
  stack->erase(begin, stack->end());
  torch::jit::Stack inner;
  for (size_t number = 0; number < count; ++number) {
    const auto& value = outer[number];
    const bool is_new = is_resized(schema.arguments()[number], value);
    const auto* alias = schema.arguments()[number].alias_info();
    inner.push_back(
        is_new ? at::empty({0}, value.toTensor().options().device(c10::kCPU))
               : converted(value, alias && alias->isWrite()));
  }
  if (waits(operation, outer)) ++host_waits;

  if (only_writes(schema, outer)) {
    current_queue().add([operation, inner]() mutable { call_on_cpu(operation, &inner); });
  } else {
    current_queue().wait();
    call_on_cpu(operation, &inner);
  }
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    const auto& returned = schema.returns()[at];
    if (returned.alias_info() == nullptr) {
      stack->push_back(result(inner[at]));
      continue;
    }
    TORCH_CHECK(returned.alias_info()->isWrite(), operation.operator_name(), " of a simulated device returns a view");
    for (size_t number = 0; number < count; ++number) {
      const auto& argument = schema.arguments()[number];
      if (argument.alias_info() == nullptr || *argument.alias_info() != *returned.alias_info()) continue;
      if (is_resized(argument, outer[number])) {
        const auto& target = outer[number].toTensor();
        at::native::resize_(target, inner[at].toTensor().sizes(), std::nullopt);
        on_cpu(target).copy_(inner[at].toTensor());
      }
      stack->push_back(outer[number]);
    }
  }
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool may_go_on) {
  const c10::OptionalDeviceGuard guard(is_ours(source) ? source.device() : target.device());
  auto& queue = current_queue();
  const bool is_on_host = !is_ours(source) || !is_ours(target);
  const auto& host = is_ours(source) ? target : source;
  const bool is_pinned = host.numel() && pinned().contains(host.const_data_ptr());
  const bool goes_on = !is_on_host || (may_go_on && (is_pinned || is_ours(source)));  // as on XPU
  // As torch's allocator of pinned memory does. Python has no object of it, whose end would need Python's lock.
  const auto held = is_on_host ? host.detach() : at::Tensor();
  const auto delay = goes_on && is_on_host ? copy_seconds.load() : 0.0;
  const auto from = on_cpu(source).detach(), to = on_cpu(target).detach();
  queue.add([from, to, held, delay] {
    at::AutoDispatchBelowADInplaceOrView below;
    sleep_for(delay);
    at::Tensor(to).copy_(from);
  });
  if (!goes_on) {
    queue.wait();
    ++host_waits;
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::OptionalDeviceGuard guard(self.device());
  current_queue().wait();
  ++host_waits;
  return at::_local_scalar_dense(on_cpu(self));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// Choose attention from plain operators: the flash kernels of the CPU are other operators, which take no device tensors.
int64_t fused_sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

// ---- What Python calls ----

void sleep_on(int64_t stream, int64_t device, double seconds) {
  streams()
      .queue(c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), stream))
      .add([seconds] { sleep_for(seconds); });
}

std::mutex holds_mutex;
std::map<int64_t, std::promise<void>> holds;

int64_t hold(int64_t stream, int64_t device) {
  static int64_t last = 0;
  std::lock_guard<std::mutex> lock(holds_mutex);
  streams()
      .queue(c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), stream))
      .add([released = holds[++last].get_future().share()] { released.wait(); });
  return last;
}

void let_go(int64_t number) {
  std::lock_guard<std::mutex> lock(holds_mutex);
  holds.at(number).set_value();
  holds.erase(number);
}

TORCH_LIBRARY(simulated, m) {
  m.def("begin() -> ()", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("hold(int stream, int device) -> int", hold);
  m.def("let_go(int number) -> ()", let_go);
  m.def("sleep(int stream, int device, float seconds) -> ()", sleep_on);
  m.def("host_waits() -> int", [] { return host_waits.load(); });
  m.def("delay_copies(float seconds) -> ()", [](double seconds) { copy_seconds = seconds; });
  m.def("pin(int address, int bytes) -> ()", [](int64_t address, int64_t bytes) {
    pinned().add(reinterpret_cast<void*>(address), bytes);
  });
  m.def("unpin(int address) -> bool", [](int64_t address) { return pinned().remove(reinterpret_cast<void*>(address)); });
}

}  // namespace
