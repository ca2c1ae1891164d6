// The examples that AWS publishes for Signature Version 4, and what else S3Store is made of without
// a server.
#include "stoker/store/s3/sigv4.h"

#include <gtest/gtest.h>

#include "stoker/store/s3/credentials.h"
#include "stoker/store/s3/location.h"
#include "stoker/store/s3/xml.h"
#include "stoker/testing/store_harness.h"

namespace stoker::s3 {
namespace {

const std::string kEmpty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const Credentials kExample{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};

std::string signature(const ToSign& request, const Credentials& credentials = kExample,
                      const std::string& service = "s3",
                      const std::string& time = "20130524T000000Z") {
  const std::string proof = authorization(request, credentials, "us-east-1", service, time);
  return proof.substr(proof.rfind('=') + 1);
}

// "Authenticating Requests: Using the Authorization Header", the four examples.
TEST(SigV4, TheExamplesOfS3) {
  const std::string host = "examplebucket.s3.amazonaws.com";
  EXPECT_EQ(signature({"GET",
                       "/test.txt",
                       {},
                       {{"host", host},
                        {"range", "bytes=0-9"},
                        {"x-amz-content-sha256", kEmpty},
                        {"x-amz-date", "20130524T000000Z"}},
                       kEmpty}),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
  const std::string body = "Welcome to Amazon S3.";
  const std::string hash = sha256_hex(body.data(), body.size());
  EXPECT_EQ(hash, "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072");
  EXPECT_EQ(signature({"PUT",
                       uri_encode("/test$file.text", true),
                       {},
                       {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                        {"host", host},
                        {"x-amz-content-sha256", hash},
                        {"x-amz-date", "20130524T000000Z"},
                        {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                       hash}),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
  const Fields plain = {
      {"host", host}, {"x-amz-content-sha256", kEmpty}, {"x-amz-date", "20130524T000000Z"}};
  EXPECT_EQ(signature({"GET", "/", {{"lifecycle", ""}}, plain, kEmpty}),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
  EXPECT_EQ(signature({"GET", "/", {{"prefix", "J"}, {"max-keys", "2"}}, plain, kEmpty}),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

// Of the test suite for the signing process.
TEST(SigV4, TheTestSuite) {
  const Credentials suite{"AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", ""};
  const std::string time = "20150830T123600Z";
  const Fields plain = {{"host", "example.amazonaws.com"}, {"x-amz-date", time}};
  EXPECT_EQ(signature({"GET", "/", {}, plain, kEmpty}, suite, "service", time),
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31");
  EXPECT_EQ(signature({"POST", "/", {}, plain, kEmpty}, suite, "service", time),
            "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b");
  EXPECT_EQ(signature({"GET", "/", {{"Param2", "value2"}, {"Param1", "value1"}}, plain, kEmpty},
                      suite, "service", time),
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500");
  EXPECT_EQ(amz_time(1440938160), time);

  const auto with = [&](std::vector<std::pair<std::string, std::string>> more) {
    more.insert(more.end(), plain.begin(), plain.end());
    return more;
  };
  const std::string unreserved =
      "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  const std::string ethiopic = "\xE1\x88\xB4";
  const std::string token =
      "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSP"
      "fIeoIYRqTflfKD8YUuwthAx7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT"
      "7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlz"
      "m8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA==";
  const std::vector<std::pair<ToSign, std::string>> vectors = {
      {{"GET", "/", {{unreserved, unreserved}}, plain, kEmpty},
       "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197"},
      {{"GET", uri_encode("/" + unreserved, true), {}, plain, kEmpty},
       "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"},
      {{"GET", uri_encode("/" + ethiopic, true), {}, plain, kEmpty},
       "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"},
      {{"GET", "/", {{ethiopic, "bar"}}, plain, kEmpty},
       "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"},
      {{"GET",
        "/",
        {},
        with({{"my-header1", " value1"}, {"my-header2", " \"a   b   c\""}}),
        kEmpty},
       "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"},
      {{"POST", "/", {{"Param1", "value1"}}, plain, kEmpty},
       "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11"},
      {{"POST", "/", {}, with({{"my-header1", "value1"}}), kEmpty},
       "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c"},
      {{"POST", "/", {}, with({{"x-amz-security-token", token}}), kEmpty},
       "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead"},
  };
  for (const auto& [request, wanted] : vectors)
    EXPECT_EQ(signature(request, suite, "service", time), wanted) << request.path;
}

TEST(S3Xml, ElementsTextAndEntities) {
  const auto xml = parse_xml(
      "<?xml version=\"1.0\"?>\n<!-- c --><a:List "
      "xmlns=\"x\"><Key>a&amp;b&#x20AC;&#65;</Key><Empty/><In><Deep> t </Deep></In></a:List>\n");
  ASSERT_OK(xml);
  EXPECT_EQ(xml->name, "List");
  EXPECT_EQ(xml->text_of("Key"),
            "a&b\xE2\x82\xAC"
            "A");
  EXPECT_NE(xml->child("Empty"), nullptr);
  EXPECT_EQ(xml->child("In")->text_of("Deep"), " t ");
  EXPECT_EQ(xml->text_of("none"), "");
}

TEST(S3Xml, WhatIsNoDocumentIsRefused) {
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "<a>";
  const std::string huge = "<a>" + std::string(17 << 20, 'x') + "</a>";
  for (const std::string& text :
       {std::string(""), std::string("x"), std::string("<a>"), std::string("<a></b>"),
        std::string("<a></a><b/>"), std::string("<a>&none;</a>"), std::string("<a>&amp</a>"),
        std::string("<!DOCTYPE a [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><a>&e;</a>"),
        std::string("<a><![CDATA[x]]></a>"), std::string("<a>&#0;</a>"),
        std::string("<a>&#xD800;</a>"), std::string("<a>&#99999999999;</a>"), std::string("< a/>"),
        std::string("<a"), std::string("<a:/>"), std::string("<a><b:></b:></a>"), deep, huge}) {
    EXPECT_EQ(code_of(parse_xml(text)), Code::corruption) << text.substr(0, 60);
  }
}

TEST(S3Location, TheCompositionIsReadAndWritten) {
  const auto location = parse_location(
      "s3://bucket/a/b%20c/?endpoint=http://"
      "127.0.0.1:7480&region=default&style=path&anon=1&patience=5");
  ASSERT_OK(location);
  EXPECT_EQ(location->bucket, "bucket");
  EXPECT_EQ(location->prefix, "a/b c/");
  EXPECT_EQ(location->endpoint, "http://127.0.0.1:7480");
  EXPECT_TRUE(location->anonymous);
  EXPECT_EQ(location->composition(),
            "s3://bucket/a/b%20c?endpoint=http://"
            "127.0.0.1:7480&region=default&style=path&anon=1&patience=5");
  EXPECT_EQ(parse_location(location->composition())->prefix, location->prefix);
  EXPECT_EQ(parse_location("s3://bucket")->prefix, "");
  EXPECT_OK(parse_location("s3://bucket?endpoint=http://[::1]:7480"));
  EXPECT_EQ(parse_endpoint("https://Host:443/")->host, "host");
  EXPECT_EQ(parse_location("s3://bucket/")->composition(), "s3://bucket");
  for (const char* wrong :
       {"s3://", "s3:///a", "s3://b b", "s3://bucket/../other", "s3://bucket/a//b",
        "s3://bucket?endpoint=ftp://x", "s3://bucket?endpoint=http://user:password@host",
        "s3://bucket?endpoint=http://host/path", "s3://bucket?endpoint=http://host:99999",
        "s3://bucket?endpoint=http://host:", "s3://bucket?endpoint=http://::1",
        "s3://bucket?endpoint=http://[::1", "s3://bucket?no=1", "s3://bucket?region",
        "s3://bucket?anon=yes", "s3://bucket?patience=-1", "s3://bucket/%zz",
        "s3://bucket?region=a%0d%0ab"}) {
    EXPECT_EQ(code_of(parse_location(wrong)), Code::invalid_argument) << wrong;
  }
}

TEST(S3Location, WhatIsMeantForOneHostGoesToNoOther) {
  const auto same = [](const char* from, const char* to) { return is_same_party(from, to); };
  EXPECT_TRUE(same("host:80", "host:7480"));
  EXPECT_TRUE(same("host:80", "bucket.host"));
  EXPECT_TRUE(same("s3.us-east-1.amazonaws.com", "bucket.s3.eu-west-1.amazonaws.com"));
  EXPECT_TRUE(same("[::1]:80", "[::1]:7480"));
  EXPECT_FALSE(same("host", "otherhost"));
  EXPECT_FALSE(same("host", "host.evil"));
  EXPECT_FALSE(same("s3.us-east-1.amazonaws.com", "amazonaws.com.evil"));
  EXPECT_FALSE(same("[::1]:80", "[::ffff:192.0.2.1]:80"));
  EXPECT_FALSE(same("[2001:db8::1]", "[2001:db8::2]"));
  for (const char* none : {"", "evil.com/", "a@b", "a\r\nb", "a b"}) EXPECT_FALSE(is_region(none));
}

TEST(S3Location, KeysThatServersMayReadInTwoWaysAreRefused) {
  const Location location = *parse_location("s3://bucket/prefix");
  for (const char* key : {"", "/a", "a/", "a//b", "..", "a/../b", "./a"})
    EXPECT_EQ(code_of(check_key(location, key)), Code::invalid_argument) << key;
  EXPECT_EQ(code_of(check_key(location, std::string(1024, 'x'))), Code::invalid_argument)
      << "with the prefix it is longer";
  EXPECT_OK(check_key(location, "a b/c+d?e#f%2e"));
}

TEST(S3Credentials, ProfilesOfTheSharedFiles) {
  const std::string file =
      "# comment\n[default]\naws_access_key_id = "
      "A\naws_secret_access_key=S=1\n\n[other]\r\naws_access_key_id=B\r\naws_secret_access_key = T "
      "\r\naws_session_token=U\r\n[half]\naws_access_key_id=C\n";
  EXPECT_EQ(credentials_in(file, "default").secret_key, "S=1");
  EXPECT_EQ(credentials_in(file, "other").session_token, "U");
  EXPECT_EQ(credentials_in(file, "other").secret_key, "T");
  EXPECT_TRUE(credentials_in(file, "half").anonymous()) << "both or none";
  EXPECT_TRUE(credentials_in(file, "none").anonymous());
  EXPECT_TRUE(credentials_in("[unclosed\naws_access_key_id", "unclosed").anonymous());
  EXPECT_EQ(region_in("[profile x]\nregion = eu-west-1\n", "x"), "eu-west-1");
  EXPECT_EQ(endpoint_in("[profile x]\nendpoint_url = http://h:1\n", "x"), "http://h:1");
}

}  // namespace
}  // namespace stoker::s3
