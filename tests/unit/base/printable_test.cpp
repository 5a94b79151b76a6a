#include "base/printable.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Printable, TextsStayAsTheyAre) {
  for (const std::string text : {"", "model.layer4.conv2.weight", "gr\u00fc\u00df", "\u5c42.\u6743",
                                 "\U0001f600", "C:\\x1b \"quoted\""}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, WhatWouldReachTheTerminalIsWrittenOut) {
  EXPECT_EQ(printable("a\x1b[2Jb"), "a\\x1b[2Jb");
  EXPECT_EQ(printable("a\rb\tc\nd\x7f"), "a\\x0db\\x09c\\x0ad\\x7f");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\u009b2J"), "\\xc2\\x9b2J");       // the same as ESC [
  EXPECT_EQ(printable("\u202exe"), "\\xe2\\x80\\xaexe");  // what follows would run backwards
  EXPECT_EQ(printable("\u2067"), "\\xe2\\x81\\xa7");
}

TEST(Printable, WhatIsNoUtf8IsWrittenOut) {
  EXPECT_EQ(printable("\x9b"), "\\x9b");
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");           // ESC, in too many bytes
  EXPECT_EQ(printable("\xe0\x80\x9b"), "\\xe0\\x80\\x9b");  // the same
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // half of a pair
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(printable("\xc3"), "\\xc3");  // cut off
  EXPECT_EQ(printable("\xc3(\u00fc"), "\\xc3(\u00fc");
}

TEST(Printable, LinesMayStay) { EXPECT_EQ(printable_lines("a\nb\r\n"), "a\nb\\x0d\n"); }

}  // namespace
}  // namespace lockstep
