// S3Store: commits. What may be sent again, and what is in doubt, is told in docs/stores/s3.md.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/condition.h"
#include "stoker/store/s3/s3_store.h"
#include "stoker/store/s3/xml.h"

namespace stoker::s3 {
namespace {

constexpr uint64_t kPartBytes = 16 * kMiB;
constexpr uint64_t kPartsMax = 10'000;
constexpr uint64_t kObjectMax = uint64_t{5} << 40;
constexpr uint64_t kCopyMax = uint64_t{5} << 30;  // by one request
constexpr size_t kPartsAhead = 8;                 // on their way before writes are held back
constexpr size_t kBatch = 1000;                   // objects that one request removes
constexpr size_t kSpareMax = 4;                   // parts' memory kept for the next ones
constexpr uint64_t kSpareBytes = kMiB;            // from which on it is

constexpr OneObjectStore kStore = {"an s3: store"};

std::string random_id() {
  std::random_device random;
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x%08x%08x%08x", random(), random(), random(),
                random());
  return digits.data();
}

void cover(std::map<uint64_t, uint64_t>& written, uint64_t begin, uint64_t end) {
  auto at = written.upper_bound(begin);
  if (at != written.begin() && std::prev(at)->second >= begin) --at;
  while (at != written.end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = written.erase(at);
  }
  written[begin] = end;
}

bool covers(const std::map<uint64_t, uint64_t>& written, uint64_t bytes) {
  return written.size() == 1 && written.begin()->first == 0 && written.begin()->second == bytes;
}

std::string xml_escape(std::string_view text) {
  std::string out;
  for (const char c : text)
    out += c == '"'   ? "&quot;"
           : c == '<' ? "&lt;"
           : c == '>' ? "&gt;"
           : c == '&' ? "&amp;"
                      : std::string(1, c);
  return out;
}

// Readers of XML take a CR for a LF, which may be another object, and refuse what is no text.
bool fits_xml(std::string_view key) {
  return std::all_of(key.begin(), key.end(), [](char c) { return c >= ' ' && c < 127; });
}

// Of an upload with these parts.
Command completion(const std::string& key, const std::string& id,
                   const std::map<size_t, Part>& parts) {
  std::string body = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  for (const auto& [index, part] : parts) {
    body += "<Part><PartNumber>" + std::to_string(index + 1) + "</PartNumber><ETag>" +
            xml_escape(part.etag) + "</ETag>";
    if (!part.crc32c.empty()) body += "<ChecksumCRC32C>" + part.crc32c + "</ChecksumCRC32C>";
    body += "</Part>";
  }
  body += "</CompleteMultipartUpload>";
  return {.method = "POST",
          .key = key,
          .query = {{"uploadId", id}},
          .text = std::move(body),
          .repeatable = false,
          .tells = "CompleteMultipartUploadResult"};
}

// Of its four bytes, the highest first.
std::string base64_of(uint32_t crc) {
  std::array<char, 4> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<char>(static_cast<unsigned char>(crc >> (24 - 8 * i)));
  return base64({bytes.data(), bytes.size()});
}

bool is_printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 127; });
}

}  // namespace

Staged::Staged() : OneObject(kStore) {}

Status S3Store::resize(Staged& staged, std::string_view key, uint64_t bytes, uint32_t chunk_bytes) {
  MutexLock lock(staged.mutex);
  STOKER_TRY(check_key(location_, key));
  STOKER_TRY(staged.check_open(key));
  if (chunk_bytes != 0) STOKER_TRY(check_chunk_bytes(chunk_bytes));
  if (bytes > kObjectMax)
    return fail(
        Code::invalid_argument,
        "'{}' would have {}, but an object in a bucket has at most 5 TiB; split it into several",
        key, human_bytes(bytes));
  if (!staged.upload.empty() || staged.pending > 0)
    return fail(Code::unsupported,
                "parts of '{}' are sent already, so its size is fixed: begin another transaction",
                key);
  staged.key = key;
  staged.bytes = bytes;
  staged.part_bytes =
      bytes <= kPartBytes
          ? kPartBytes
          : std::max(kPartBytes, align_up((bytes + kPartsMax - 1) / kPartsMax, kMiB));
  staged.parts.clear();
  staged.attempt = random_id();
  staged.touched = true;
  staged.removed = false;
  return {};
}

Future<void> S3Store::write(const StagedPtr& staged, std::string_view key, uint64_t offset,
                            Slice from, Priority priority) {
  MutexLock lock(staged->mutex);
  const Status written = [&]() REQUIRES(staged->mutex) -> Status {
    STOKER_TRY(check_key(location_, key));
    STOKER_TRY(staged->check_open(key));
    STOKER_TRY(staged->check_write(key, offset, from.size, [&] {
      const auto there = stat(key, {});
      return there ? Status() : Status(there.error());
    }));
    if (staged->failed) return *staged->failed;
    staged->priority = priority;
    return write_locked(staged, offset, from, lock);
  }();
  if (!written) {
    staged->refuse(written.error());
    return written;
  }
  // Held back, so that memory does not fill with parts faster than they are sent.
  if (staged->pending > kPartsAhead) return staged->waiting.emplace_back().future();
  return Status();
}

Status S3Store::write_locked(const StagedPtr& staged, uint64_t offset, Slice from,
                             MutexLock& lock) {
  for (size_t moved = 0; moved < from.size;) {
    const uint64_t at = offset + moved;
    const size_t index = at / staged->part_bytes;
    const uint64_t in_part = at % staged->part_bytes;
    const size_t piece = std::min<uint64_t>(staged->part_bytes - in_part, from.size - moved);
    STOKER_ASSIGN(Part * part, part_of(*staged, index, lock));
    std::memcpy(part->bytes.data() + in_part, from.data + moved, piece);
    cover(part->written, in_part, in_part + piece);
    moved += piece;
    const uint64_t whole = std::min(staged->part_bytes, staged->bytes - index * staged->part_bytes);
    if (staged->bytes > kPartBytes && covers(part->written, whole)) send_part(staged, index);
  }
  return {};
}

// Memory that was used before may be up to twice as large.
Result<Part> S3Store::memory_for(uint64_t bytes) {
  MutexLock lock(spare_mutex_);
  const auto fits = [bytes](const Part& each) {
    return each.bytes.size() >= bytes && each.bytes.size() <= 2 * bytes;
  };
  if (const auto at = std::find_if(spare_.begin(), spare_.end(), fits); at != spare_.end()) {
    Part part = std::move(*at);
    spare_.erase(at);
    return part;
  }
  constexpr const char* kWho = "a part of an object on its way to a bucket";
  auto grant = runtime_.budget.take(bytes, kWho);
  if (!grant && !spare_.empty()) {
    spare_.clear();
    grant = runtime_.budget.take(bytes, kWho);
  }
  if (!grant) return grant.error();
  Part part;
  part.grant = std::move(*grant);
  part.bytes = AlignedBytes(bytes);
  return part;
}

void S3Store::spare(Part sent) {
  Part memory;
  memory.bytes = std::move(sent.bytes);
  memory.grant = std::move(sent.grant);
  MutexLock lock(spare_mutex_);
  if (open_ > 0 && spare_.size() < kSpareMax && memory.bytes.size() >= kSpareBytes)
    spare_.push_back(std::move(memory));
}

void S3Store::opened() {
  MutexLock lock(spare_mutex_);
  ++open_;
}

void S3Store::closed() {
  MutexLock lock(spare_mutex_);
  if (--open_ == 0) spare_.clear();
}

Result<Part*> S3Store::part_of(Staged& staged, size_t index, MutexLock& lock) {
  const uint64_t bytes = std::min(staged.part_bytes, staged.bytes - index * staged.part_bytes);
  for (;;) {
    if (const auto at = staged.parts.find(index); at != staged.parts.end()) {
      if (!at->second.sent) return &at->second;
      return fail(Code::unsupported,
                  "part {} of '{}' was written and is sent already: write each byte once", index,
                  staged.key);
    }
    // Who waits on the client's thread keeps it from sending what is to make room.
    const bool waits = staged.pending > 0 && !client_->here();
    if (staged.pending <= kPartsAhead || !waits) {
      if (auto part = memory_for(bytes))
        return &(staged.parts[index] = std::move(*part));
      else if (!waits)
        return part.error();
    }
    staged.part_ended.wait(lock);  // parts that are sent give room back
    if (staged.failed) return *staged.failed;
  }
}

// What was not written is zeros.
void fill_gaps(const Part& part, uint64_t bytes) {
  uint64_t at = 0;
  for (const auto& [begin, end] : part.written) {
    std::memset(part.bytes.data() + at, 0, begin - at);
    at = end;
  }
  std::memset(part.bytes.data() + at, 0, bytes - at);
}

// From here on the bytes are the job's.
void S3Store::send_part(const StagedPtr& staged, size_t index) {
  Part& part = staged->parts[index];
  part.sent = true;
  ++staged->pending;
  auto given = std::make_shared<Part>();
  given->bytes = std::exchange(part.bytes, AlignedBytes());
  given->grant = std::exchange(part.grant, Grant());
  given->written = std::exchange(part.written, {});
  given->priority = staged->priority;
  workers_->run([this, staged, index, given]() mutable {
    const Status status = send_part_now(*staged, index, *given);
    spare(std::move(*given));  // before whoever waits for room is told
    part_ended(staged, status);
  });
}

Status S3Store::send_part_now(Staged& staged, size_t index, const Part& part) {
  {
    MutexLock lock(staged.mutex);
    if (staged.failed) return *staged.failed;
  }
  STOKER_TRY(begin_upload(staged));
  const uint64_t bytes = std::min(staged.part_bytes, staged.bytes - index * staged.part_bytes);
  fill_gaps(part, bytes);
  const Slice body = part.bytes.slice().sub(0, bytes);
  Command command{.method = "PUT",
                  .key = whole(staged.key),
                  .query = {{"partNumber", std::to_string(index + 1)}, {"uploadId", staged.upload}},
                  .body = body,
                  .priority = part.priority};
  const std::string crc = staged.checks ? base64_of(crc32c(body.data, body.size)) : "";
  if (staged.checks) command.headers = {{"x-amz-checksum-crc32c", crc}};
  // Without TLS anybody on the way could change both the bytes and their checksum.
  command.sha256 = staged.checks && client_->tls() ? kUnsigned : sha256_hex(body.data, body.size);
  const Reply reply = *client_->send(std::move(command)).wait();
  if (reply.error) return reply.error->with("part " + std::to_string(index + 1));
  MutexLock lock(staged.mutex);
  staged.parts[index].crc32c = crc;
  staged.parts[index].etag = reply.answer.header("etag");
  if (!staged.parts[index].etag.empty()) return {};
  return fail(Code::io, "the server names no ETag of a part of '{}'; use a server that does",
              staged.key);
}

Status S3Store::begin_upload(Staged& staged) {
  MutexLock beginning(staged.upload_mutex);
  if (!staged.upload.empty()) return {};
  STOKER_ASSIGN(const Upload begun, new_upload(whole(staged.key), staged.attempt));
  uploads_.begun(whole(staged.key), begun.id);
  MutexLock lock(staged.mutex);
  staged.upload = begun.id;
  staged.checks = begun.checks;
  return {};
}

// A lost answer leaves an upload without parts that nobody knows the id of: a lifecycle rule of the
// bucket ends it.
Result<S3Store::Upload> S3Store::new_upload(const std::string& key,
                                            const std::string& attempt) const {
  Command command{.method = "POST", .key = key, .query = {{"uploads", ""}}};
  command.headers = {{std::string(kAttemptHeader), attempt},
                     {"x-amz-checksum-algorithm", "CRC32C"}};
  const Reply reply = *client_->send(std::move(command)).wait();
  if (reply.error) return *reply.error;
  const auto xml = parse_xml(reply.answer.body);
  std::string id(xml ? xml->text_of("UploadId") : std::string_view());
  if (id.empty())
    return fail(
        Code::io,
        "the server names no id of the upload of '{}'; check that endpoint= is an S3 server", key);
  return Upload{std::move(id), reply.answer.header("x-amz-checksum-algorithm") == "CRC32C"};
}

void S3Store::part_ended(const StagedPtr& staged, const Status& status) {
  std::function<void()> then;
  std::vector<Promise<void>> free;
  {
    MutexLock lock(staged->mutex);
    then = staged->ended(status);
    staged->part_ended.notify_all();
    if (staged->pending <= kPartsAhead) free.swap(staged->waiting);
  }
  for (auto& each : free) each.complete(Status());
  if (then) then();
}

Status S3Store::remove(Staged& staged, std::string_view key) {
  MutexLock lock(staged.mutex);
  STOKER_TRY(check_key(location_, key));
  STOKER_TRY(staged.check_open(key));
  if (staged.removed) return fail(Code::not_found, "'{}' is removed already", key);
  if (!staged.touched) {
    if (const auto there = stat(key, {}); !there) return there.error();
  }
  if (!staged.upload.empty() || staged.pending > 0)
    return fail(Code::unsupported,
                "parts of '{}' are sent already: remove it in another transaction", key);
  staged.key = key;
  staged.parts.clear();
  staged.attempt = random_id();
  staged.touched = staged.removed = true;
  return {};
}

Status S3Store::require(Staged& staged, std::string_view key, std::string_view tag) {
  MutexLock lock(staged.mutex);
  STOKER_TRY(check_key(location_, key));
  STOKER_TRY(staged.check_open(key));
  STOKER_ASSIGN(const Match conditional, conditions());
  if (conditional == Match::none)
    return fail(Code::unsupported,
                "the {} has no conditional writes, so no condition can be set for '{}'; leave the "
                "condition out, or use another server",
                client_->where(), key);
  staged.key = key;
  staged.required = std::string(tag);
  return {};
}

Future<Version> S3Store::commit(const StagedPtr& staged) {
  MutexLock lock(staged->mutex);
  if (const Status open = staged->finish(); !open) return open.error();
  if (staged->touched && !staged->removed && staged->bytes > kPartBytes && !staged->failed &&
      !staged->required) {
    // What was not written is zeros.
    for (size_t index = 0; index * staged->part_bytes < staged->bytes && !staged->failed; ++index) {
      if (const auto at = staged->parts.find(index); at != staged->parts.end() && at->second.sent)
        continue;
      if (const auto part = part_of(*staged, index, lock); part)
        send_part(staged, index);
      else
        staged->failed = part.error();
    }
  }
  auto promise = std::make_shared<Promise<Version>>();
  Future<Version> future = promise->future();
  staged->settle(*workers_, [this, staged, promise] { promise->complete(commit_now(*staged)); });
  return future;
}

void S3Store::abandon(const StagedPtr& staged) {
  MutexLock lock(staged->mutex);
  if (staged->done) return;
  staged->done = true;
  if (!staged->failed)
    // parts that wait are not sent
    staged->failed = fail(Code::cancelled, "the transaction was abandoned");
  if (staged->pending > 0 || !staged->upload.empty())
    staged->settle(*workers_, [this, staged] { abort_upload(*staged); });
}

// Nothing else works on `staged` any more.
Result<Version> S3Store::commit_now(Staged& staged) {
  Status status = staged.failed ? Status(*staged.failed) : Status();
  if (status && staged.touched) {
    const bool large = staged.bytes > kPartBytes;
    if (staged.required && staged.removed) {
      status =
          fail(Code::unsupported,
               "a bucket cannot remove '{}' under a condition; remove it without one", staged.key);
    } else if (staged.required && large) {
      status = fail(
          Code::unsupported,
          "'{}' has {}, but with a condition this bucket takes at most 16 MiB{}; write it without "
          "one",
          staged.key, human_bytes(staged.bytes),
          uploads_ignore_conditions() ? ", as its server ignores conditions of uploads" : "");
    } else {
      status = staged.removed ? delete_object(staged)
               : large        ? complete_upload(staged)
                              : put_whole(staged);
    }
  } else if (status && staged.required) {
    const auto there = stat(staged.key, {});
    if (!there && there.error().code != Code::not_found) return there.error();
    status = check_required(staged.key, *staged.required, there ? there->tag : std::string());
  }
  for (auto& [index, part] : staged.parts) spare(std::move(part));
  staged.parts.clear();
  if (!status) {
    // An upload that may have been completed is not there to be aborted: nothing is lost by trying.
    if (!staged.upload.empty()) abort_upload(staged);
    return status.error();
  }
  uploads_.ended(staged.upload);
  return ++commits_;
}

Status S3Store::put_whole(Staged& staged) {
  Command command{.method = "PUT", .key = whole(staged.key)};
  command.headers = {{std::string(kAttemptHeader), staged.attempt}};
  if (staged.bytes > 0) {
    MutexLock lock(staged.mutex);
    STOKER_ASSIGN(const Part* part, part_of(staged, 0, lock));
    fill_gaps(*part, staged.bytes);
    command.body = part->bytes.slice().sub(0, staged.bytes);
    command.priority = staged.priority;
  }
  command.sha256 = sha256_hex(command.body.data, command.body.size);
  command.repeatable = staged.required.has_value();
  command.tagged = true;
  if (staged.required) {
    if (!is_printable(*staged.required))
      return check_required(staged.key, *staged.required, "another");
    STOKER_ASSIGN(const Match form, conditions());
    if (staged.required->empty())
      command.headers.emplace_back("if-none-match", "*");
    else
      command.headers.emplace_back(
          "if-match", form == Match::bare ? *staged.required : etag_of_tag(*staged.required));
  }
  return decide(staged, *client_->send(std::move(command)).wait(), false);
}

Status S3Store::complete_upload(Staged& staged) {
  Command command = completion(whole(staged.key), staged.upload, staged.parts);
  const Reply reply = *client_->send(std::move(command)).wait();
  STOKER_TRY(decide(staged, reply, false));
  if (reply.verdict != Reply::Verdict::ok) return {};  // it looked: it is ours that is there
  // An ETag of S3 ends with a dash and the number of parts that the object was made of. Another
  // server's says what it likes.
  const auto xml = parse_xml(reply.answer.body);
  const std::string tag = tag_of_etag(xml ? xml->text_of("ETag") : std::string_view());
  constexpr size_t kDigits = 32;  // of an MD5
  size_t made = 0;
  const char* end = tag.data() + tag.size();
  if (tag.find_first_not_of("0123456789abcdef") != kDigits || tag[kDigits] != '-') return {};
  const auto read = std::from_chars(tag.data() + kDigits + 1, end, made);
  if (read.ec != std::errc() || read.ptr != end || made == staged.parts.size()) return {};
  return fail(Code::corruption,
              "the server made '{}' in the {} of {} parts, but was sent {}: write it again",
              staged.key, client_->where(), made, staged.parts.size());
}

Status S3Store::delete_object(Staged& staged) {
  return decide(
      staged,
      *client_->send({.method = "DELETE", .key = whole(staged.key), .repeatable = false}).wait(),
      true);
}

// What became of a commit. `gone`: it removes the object.
Status S3Store::decide(Staged& staged, const Reply& reply, bool gone) const {
  if (reply.verdict == Reply::Verdict::ok) return {};
  const bool refused = reply.verdict != Reply::Verdict::lost;
  const bool conflict =
      reply.answer.status == 412 || (staged.required && !staged.required->empty() &&
                                     reply.answer.status == 404 && reply.code != "NoSuchBucket");
  // A refusal is believed, but for one that an earlier try of the same may have caused: ours, or
  // one of a proxy on the way.
  const bool twice = reply.answer.status == 412 || reply.code == "NoSuchUpload";
  if (refused && !reply.lost_before && !twice) {
    if (conflict) return check_required(staged.key, *staged.required, std::string());
    return *reply.error;
  }
  std::string attempt;
  const auto there = head(staged.key, &attempt);
  const bool missing = !there && there.error().code == Code::not_found;
  if (gone ? missing : (there && attempt == staged.attempt)) return {};
  if (refused && conflict && !reply.lost_before && (there || missing)) {
    return fail(Code::conflict,
                "'{}' in the {} does not meet the condition: another writer was first. Nothing was "
                "committed: look at the object, then decide",
                staged.key, client_->where());
  }
  if (refused && reply.code == "NoSuchUpload" && (there || missing)) {
    return fail(Code::io,
                "something else (a lifecycle rule, for example) ended the upload of '{}' in the "
                "{}: nothing was committed, write it again",
                staged.key, client_->where());
  }
  return fail(Code::in_doubt,
              "nobody knows whether '{}' in the {} was {}, as the answer was lost ({}); the "
              "request may still arrive: look at the object before you commit it again",
              staged.key, client_->where(), gone ? "removed" : "written",
              reply.lost_before.value_or(*reply.error).what);
}

void S3Store::abort_upload(Staged& staged) {
  if (staged.upload.empty()) return;
  if (abort_now(whole(staged.key), staged.upload)) {
    uploads_.ended(staged.upload);
    return;
  }
  MutexLock lock(left_mutex_);
  left_.emplace_back(whole(staged.key), staged.upload);
}

// What is not there any more is aborted.
Status S3Store::abort_now(const std::string& key, const std::string& id) const {
  const Reply reply =
      *client_->send({.method = "DELETE", .key = key, .query = {{"uploadId", id}}}).wait();
  return !reply.error || reply.error->code == Code::not_found ? Status() : Status(*reply.error);
}

// Runs into conflicts on purpose, on an object that nobody else knows.
Result<S3Store::Match> S3Store::probe_conditions() const {
  const std::string key = location_.prefix + ".stoker-probe-" + random_id();
  std::optional<Error> failed;  // not an answer to what was asked
  std::string etag;
  const auto put = [&](const std::string& name, const std::string& value) {
    if (failed) return 0;
    const Reply reply =
        *client_->send({.method = "PUT", .key = key, .headers = {{name, value}}, .text = "probe"})
             .wait();
    const int status = reply.answer.status;
    const bool done = reply.verdict == Reply::Verdict::ok;
    if (done) etag = reply.answer.header("etag");
    // A server that does not know the header may refuse it, too.
    const bool answered = done || status == 412 || status == 400 || status == 501;
    if (!answered || reply.lost_before) failed = reply.error.value_or(Error());
    return done ? 200 : status;
  };
  const std::string other(32, '0');
  Match found = Match::none;
  const int made = put("if-none-match", "*");
  if (made == 200 && put("if-none-match", "*") == 412 &&
      put("if-match", etag_of_tag(other)) == 412) {
    const std::string tag = tag_of_etag(etag);
    if (put("if-match", etag_of_tag(tag)) == 200)
      found = Match::quoted;
    else if (put("if-match", tag) == 200 && put("if-match", other) == 412)
      found = Match::bare;  // as Ceph's RGW before 18 compares it
  }
  client_->send({.method = "DELETE", .key = key}).wait();
  if (failed)
    return failed->with("asking the " + client_->where() + " whether it knows conditions");
  if (found == Match::none)
    log().warn("the {} has no conditional writes ({}): commits with a condition are refused",
               client_->where(),
               made == 200 ? "it overwrites what it should not" : "status " + std::to_string(made));
  return found;
}

// Whether an upload takes the place of an object under If-None-Match. Asked apart from PUT: there
// are servers that know the one and not the other. What nobody answered is no reason to say so.
bool S3Store::uploads_ignore_conditions() const {
  MutexLock lock(probe_mutex_);
  if (!uploads_ignore_) {
    const std::string key = location_.prefix + ".stoker-probe-" + random_id();
    const Reply put = *client_->send({.method = "PUT", .key = key, .text = "probe"}).wait();
    const auto upload = put.error ? Result<Upload>(*put.error) : new_upload(key, random_id());
    if (!upload) return false;
    const std::string text = "probe";
    Command part{.method = "PUT",
                 .key = key,
                 .query = {{"partNumber", "1"}, {"uploadId", upload->id}},
                 .text = text};
    std::map<size_t, Part> parts;
    if (upload->checks) {
      parts[0].crc32c = base64_of(crc32c(text.data(), text.size()));
      part.headers = {{"x-amz-checksum-crc32c", parts[0].crc32c}};
    }
    const Reply sent = *client_->send(std::move(part)).wait();
    parts[0].etag = sent.answer.header("etag");
    Command end = completion(key, upload->id, parts);
    end.headers.emplace_back("if-none-match", "*");
    const Reply ended = *client_->send(std::move(end)).wait();
    const bool done = ended.verdict == Reply::Verdict::ok;
    if (done || ended.answer.status == 412) uploads_ignore_ = done;
    if (!done && !abort_now(key, upload->id))
      log().warn(
          "an unfinished upload of '{}' stays in the {} and takes space; abort it with another "
          "tool",
          key, client_->where());
    client_->send({.method = "DELETE", .key = key}).wait();
  }
  return uploads_ignore_.value_or(false);
}

Status S3Store::remove(const std::vector<std::string>& keys) {
  if (read_only_) return read_only_error();
  for (const std::string& key : keys) STOKER_TRY(check_key(location_, key));
  const std::span<const std::string> all(keys);
  for (size_t at = 0; at < all.size(); at += kBatch)
    STOKER_TRY(delete_batch(all.subspan(at, std::min(kBatch, all.size() - at))));
  return {};
}

// The server has no word for what was not there, so that is asked first, side by side.
Status S3Store::delete_batch(std::span<const std::string> keys) {
  std::vector<Future<Reply>> looks;
  for (const std::string& key : keys)
    looks.push_back(client_->send({.method = "HEAD", .key = whole(key)}));
  std::optional<Error> missing;
  for (const auto& each : looks) {
    const auto& found = each.wait();
    if (found->error && !missing) missing = found->error;
  }
  if (missing) return *missing;
  std::string body =
      "<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Quiet>true</Quiet>";
  std::vector<std::pair<const std::string*, Future<Reply>>> alone;
  bool any = false;
  for (const std::string& key : keys) {
    if (fits_xml(whole(key))) {
      body += "<Object><Key>" + xml_escape(whole(key)) + "</Key></Object>";
      any = true;
    } else {
      Command command{.method = "DELETE", .key = whole(key), .repeatable = false};
      alone.emplace_back(&key, client_->send(std::move(command)));
    }
  }
  Status status = any ? delete_listed(body + "</Delete>", keys.size()) : Status();
  for (const auto& [key, done] : alone) {
    const auto& reply = done.wait();
    if (!reply->error || !status) continue;
    status = reply->verdict != Reply::Verdict::lost
                 ? *reply->error
                 : fail(Code::in_doubt,
                        "nobody knows whether '{}' in the {} was removed, as the answer was lost; "
                        "look before you remove it again",
                        *key, client_->where());
  }
  if (status) commits_ += keys.size();
  return status;
}

// The objects that `body` names, as one request.
Status S3Store::delete_listed(std::string body, size_t count) {
  const std::string md5 = md5_base64(body);  // S3 wants it here, beside the signature
  const Reply reply = *client_
                           ->send({.method = "POST",
                                   .query = {{"delete", ""}},
                                   .headers = {{"content-md5", md5}},
                                   .text = std::move(body),
                                   .repeatable = false,
                                   .tells = "DeleteResult"})
                           .wait();
  if (reply.verdict == Reply::Verdict::lost)
    return fail(Code::in_doubt,
                "nobody knows which of {} objects in the {} were removed, as the answer was lost "
                "({}); look before you remove them again",
                count, client_->where(), reply.error->what);
  if (reply.error) return *reply.error;
  STOKER_ASSIGN(const Xml result, parse_xml(reply.answer.body));
  for (const Xml& each : result.children) {
    if (each.name != "Error") continue;
    return fail(each.text_of("Code") == "AccessDenied" ? Code::no_permission : Code::io,
                "the server does not remove '{}' from the {}: {}", each.text_of("Key"),
                client_->where(), each.text_of("Code"));
  }
  return {};
}

Result<Version> S3Store::copy(std::string_view from, std::string_view to) {
  if (read_only_) return read_only_error();
  if (from == to) return fail(Code::invalid_argument, "'{}' cannot be copied to itself", from);
  STOKER_TRY(check_key(location_, to));
  STOKER_ASSIGN(const ObjectInfo source, stat(from, {}));
  if (source.bytes >= kCopyMax) return Store::copy(from, to);
  Command command{
      .method = "PUT", .key = whole(to), .repeatable = false, .tells = "CopyObjectResult"};
  command.headers = {{"x-amz-copy-source", "/" + uri_encode(location_.bucket, false) + "/" +
                                               uri_encode(whole(from), true)},
                     {"x-amz-copy-source-if-match", etag_of_tag(source.tag)}};
  const Reply reply = *client_->send(std::move(command)).wait();
  if (reply.verdict == Reply::Verdict::ok) return ++commits_;
  if (reply.answer.status == 412)
    return fail(Code::conflict, "'{}' in the {} was changed while it was copied; copy it again",
                from, client_->where());
  if (reply.verdict != Reply::Verdict::lost) return *reply.error;
  if (const auto made = head(to, nullptr); made && made->tag == source.tag)
    return ++commits_;  // it is what it should become
  return fail(Code::in_doubt,
              "nobody knows whether '{}' in the {} was written, as the answer was lost: look at it "
              "before you copy again",
              to, client_->where());
}

}  // namespace stoker::s3
