package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// replay runs the command and returns its exit code and what it wrote.
func replay(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = command(args, &out, &err)
	return code, out.String(), err.String()
}

// file writes a file into a folder of its own and returns its name.
func file(t *testing.T, name, text string) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// small are flags of a replay that is over at once.
var small = []string{"-duration", "30s", "-endpoints", "2", "-kv", "16000"}

func with(args ...string) []string { return append(append([]string{}, small...), args...) }

// traffic is a trace with priorities 1 and 9: long prompts that fill two endpoints of 16000 tokens, and
// bursts of shorter ones that are urgent.
func traffic(comma bool) string {
	var b strings.Builder
	if comma {
		b.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens,Priority\n")
	}
	for i := range 400 {
		prompt, output, priority := 3000, 200, 1
		if i%40 >= 30 {
			prompt, output, priority = 1500, 50, 9
		}
		at := time.Duration(i) * 50 * time.Millisecond
		if comma {
			fmt.Fprintf(&b, "%.2f,%d,%d,%d\n", at.Seconds(), prompt, output, priority)
		} else {
			fmt.Fprintf(&b, `{"timestamp": %d, "input_length": %d, "output_length": %d, "priority": %d}`+"\n", at.Milliseconds(), prompt, output, priority)
		}
	}
	return b.String()
}

func TestFlags(t *testing.T) {
	html := filepath.Join(t.TempDir(), "page.html")
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"an argument", []string{"trace.csv"}, `unexpected argument "trace.csv"`},
		{"an unknown flag", []string{"-pods", "3"}, "not defined: -pods"},
		{"one trace and two", []string{"-trace", "a", "-urgent", "b"}, "-trace has all requests"},
		{"workers of one trace", []string{"-trace", "a", "-workers", "3"}, "-trace has all requests"},
		{"a line of two traces", []string{"-evict-below", "3"}, "-evict-below is for -trace"},
		{"scale 0", []string{"-scale", "0"}, "-scale"},
		{"scale NaN", []string{"-scale", "NaN"}, "-scale"},
		{"too short", []string{"-duration", "20s"}, "-duration"},
		{"negative duration", []string{"-duration", "-1s"}, "-duration"},
		{"too long", []string{"-duration", "25h"}, "-duration"},
		{"workers", []string{"-workers", "-1"}, "-workers"},
		{"no endpoint", []string{"-endpoints", "0"}, "-endpoints"},
		{"no KV cache", []string{"-kv", "0"}, "-kv"},
		{"more sequences than tokens", []string{"-seqs", "300", "-batch", "299"}, "-batch"},
		{"a step of no time", []string{"-step", "0"}, "-step"},
		{"negative prefill", []string{"-step-prefill", "-1us"}, "-step-prefill"},
		{"negative lag", []string{"-abort-lag", "-1s"}, "-abort-lag"},
		{"samples all the time", []string{"-sample", "0"}, "-sample"},
		{"target", []string{"-target", "0"}, "-target"},
		{"ceiling NaN", []string{"-ceiling", "NaN"}, "-ceiling"},
		{"ceiling above 1", []string{"-sheddable-ceiling", "1.1"}, "-sheddable-ceiling"},
		{"concurrency", []string{"-concurrency", "0"}, "-concurrency"},
		{"retry", []string{"-retry", "always"}, "want backoff, immediate"},
		{"policy", []string{"-policies", "ours,theirs"}, `no "theirs"`},
		{"no page", []string{"-html", ""}, "-html"},
		{"a folder as page", []string{"-html", t.TempDir()}, "is a folder"},
		{"no folder", []string{"-html", filepath.Join(t.TempDir(), "no", "page.html")}, "-html"},
		{"no file", []string{"-urgent", "no.csv"}, "no.csv"},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := c.args
			if c.args[0] != "-html" {
				args = append([]string{"-html", html}, args...)
			}
			code, stdout, stderr := replay(args...)
			if code != 2 || stdout != "" || !strings.Contains(stderr, c.want) {
				t.Errorf("exit code %d, stdout %q, stderr %q, want 2, nothing, and %q", code, stdout, stderr, c.want)
			}
			if _, err := os.Stat(html); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("there is a page: %v", err)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	code, stdout, stderr := replay("-h")
	if code != 0 || stdout != "" {
		t.Errorf("exit code %d, stdout %q", code, stdout)
	}
	for _, p := range policyRows {
		if !strings.Contains(stderr, "\n  "+p.key+" ") {
			t.Errorf("nothing of policy %s", p.key)
		}
	}
	csv := regexp.MustCompile(`(?m)^  (TIMESTAMP.*)\n  (.*)$`).FindStringSubmatch(stderr)
	jsonl := regexp.MustCompile(`(?m)^  (\{.*\})$`).FindStringSubmatch(stderr)
	if csv == nil || jsonl == nil {
		t.Fatalf("no example of a trace in\n%s", stderr)
	}
	for name, text := range map[string]string{"usage.csv": csv[1] + "\n" + csv[2] + "\n", "usage.jsonl": jsonl[1] + "\n"} {
		if code, _, stderr := replay("-html", "none", "-policies", "ours", "-trace", file(t, name, text)); code != 0 {
			t.Errorf("%s: exit code %d: %s", name, code, stderr)
		}
	}
}

func TestTraceErrors(t *testing.T) {
	const head = "TIMESTAMP,ContextTokens,GeneratedTokens,Priority\n"
	for _, c := range []struct {
		name, text string
		want       []string // beside the file's name
	}{
		{"empty", "", []string{"empty"}},
		{"a header alone", head, []string{"without a request"}},
		{"no such columns", "a,b,c\n1,2,3\n", []string{"line 1", "timestamp"}},
		{"a time that is none", head + "0,1,1,1\nnoon,1,1,1\n", []string{"line 3", "noon"}},
		{"tokens that are none", head + "0,many,1,1\n", []string{"line 2", "many"}},
		{"negative tokens", head + "0,1,-1,1\n", []string{"line 2", "-1"}},
		{"a priority that is none", head + "0,1,1,high\n", []string{"line 2", "high"}},
		{"a column short", head + "0,1,1,1\n0,1,1\n", []string{"line 3"}},
		{"JSON cut off", `{"timestamp": 0, "input_length": 1, "output_length": 1}` + "\n" + `{"timestamp"`, []string{"line 2"}},
		{"no priorities", "TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,1\n", []string{"no priorities", "-urgent"}},
		{"nothing urgent", head + "0,1,1,-1\n", []string{"no request of priority 0 or above", "-evict-below"}},
		{"all too large", head + "0,28800,1,1\n", []string{"28800 tokens or more", "-kv"}},
		{"all urgent too large", head + "0,28800,1,1\n0,10,10,-1\n", []string{"28800 tokens or more", "-kv"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := file(t, "mine.txt", c.text)
			code, stdout, stderr := replay("-html", "none", "-trace", name)
			if code != 2 || stdout != "" {
				t.Errorf("exit code %d, stdout %q", code, stdout)
			}
			for _, want := range append(c.want, "mine.txt") {
				if !strings.Contains(stderr, want) {
					t.Errorf("stderr %q, want %q in it", stderr, want)
				}
			}
		})
	}
}

// decode reads what -json prints.
func decode(t *testing.T, text string) (r Report) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return r
}

func TestFormats(t *testing.T) {
	lines := []string{"-trace", file(t, "mine.jsonl", traffic(false)), "-evict-below", "5", "-json", "-html", "none", "-policies", "none,ours,alone"}
	code, text, stderr := replay(with(lines...)...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	r := decode(t, text)
	if len(r.Policies) != 3 {
		t.Fatalf("%d policies", len(r.Policies))
	}
	for i, s := range r.Policies {
		if s.Urgent != 100 {
			t.Errorf("%s: %d urgent requests, want 100", s.Policy, s.Urgent)
		}
		if alone := s.Policy == "alone"; alone != (s.Sheddable == 0) || alone != (s.TokensPerSecond == 0) {
			t.Errorf("%s: %d sheddable requests were completed, %v tokens a second", s.Policy, s.Sheddable, s.TokensPerSecond)
		}
		if want := []string{"none", "ours", "alone"}[i]; s.Policy != want {
			t.Errorf("policy %q, want %q", s.Policy, want)
		}
	}
	none, ours := r.Policies[0], r.Policies[1]
	if none.Evictions != 0 || ours.Evictions == 0 || ours.UrgentTTFT.P99 >= none.UrgentTTFT.P99 {
		t.Errorf("evictions %d and %d, TTFT p99 %v and %v ms: want none and some, and less", none.Evictions, ours.Evictions, none.UrgentTTFT.P99, ours.UrgentTTFT.P99)
	}

	// The same in the other format, and again, is the same.
	lines[1] = file(t, "mine.jsonl", traffic(true))
	_, again, stderr := replay(with(lines...)...)
	decisions := regexp.MustCompile(`"decision_.*`)
	if a, b := decisions.ReplaceAllString(text, ""), decisions.ReplaceAllString(again, ""); a != b {
		t.Errorf("CSV differs from JSON lines (%s):\n%s\n%s", stderr, a, b)
	}

	// With the line above or below all, nothing is evicted.
	lines[3] = "1"
	_, text, _ = replay(with(lines...)...)
	if s := decode(t, text).Policies[1]; s.Urgent != 400 || s.Evictions != 0 {
		t.Errorf("all urgent: %d urgent requests and %d evictions, want 400 and 0", s.Urgent, s.Evictions)
	}
}

func TestProgress(t *testing.T) {
	args := with("-html", filepath.Join(t.TempDir(), "page.html"), "-policies", "gate,ours")
	code, stdout, stderr := replay(args...)
	if lines := strings.Split(strings.TrimSpace(stderr), "\n"); code != 0 || len(lines) != 4 || strings.ContainsAny(stderr, "%\r\x1b") {
		t.Errorf("exit code %d, stderr %q, want a line for what is replayed, each policy and the page", code, stderr)
	}
	for _, want := range []string{"ours, no eviction", "urgent TTFT", "on time", "1/s", "of one"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if _, _, stderr := replay(append(args, "-q")...); stderr != "" {
		t.Errorf("-q: stderr %q", stderr)
	}
	var b bytes.Buffer
	p := &progress{w: &b, live: true}
	p.now("half")
	p.line("done")
	if got, want := b.String(), "\r\x1b[Khalf\r\x1b[Kdone\n"; got != want {
		t.Errorf("on a terminal %q, want %q", got, want)
	}
}

func TestPage(t *testing.T) {
	one := "TIMESTAMP,ContextTokens,GeneratedTokens,Priority\n0,100,1,0\n"
	for _, c := range []struct {
		name  string
		args  []string
		plots int // without swatches
	}{
		{"bundled", with(), 3 + 7},
		{"many endpoints", []string{"-duration", "25s", "-endpoints", "12", "-workers", "200", "-policies", "gauge,ours"}, 3 + 2},
		{"one trace", with("-evict-below", "5", "-trace", file(t, "a<script>&'\".csv", traffic(true))), 3 + 7},
		{"one request", with("-trace", file(t, "one.csv", one)), 2 + 7},
		{"nothing sheddable", with("-workers", "0"), 2 + 7},
		{"nothing in time", with("-urgent", file(t, "late.csv", one+"100,1,1,0\n"), "-policies", "none"), 3 + 1},
		{"a policy alone", with("-policies", "alone"), 2 + 1},
		{"a long time", []string{"-duration", "4000s", "-urgent", file(t, "late.csv", one+"3900,100,1,0\n"), "-policies", "alone"}, 2 + 1},
		{"a short time", []string{"-trace", file(t, "one.csv", one), "-duration", "3ms"}, 2 + 7},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := filepath.Join(t.TempDir(), "page.html")
			if code, _, stderr := replay(append(c.args, "-q", "-html", name)...); code != 0 {
				t.Fatalf("exit code %d: %s", code, stderr)
			}
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			checkPage(t, text, c.plots)
		})
	}
}

// checkPage holds a page against what each must be: well-formed, complete without anything else, and
// without numbers that are none.
func checkPage(t *testing.T, text []byte, plots int) {
	t.Helper()
	if len(text) > 2<<20 {
		t.Errorf("%d bytes", len(text))
	}
	for _, bad := range []string{`[a-zA-Z]+://`, `(?i)<script`, `(?i)<link`, `(?i)\b(src|href)\s*=`, `url\(`, `@import`, `xmlns`, `\bNaN\b`, `[+-]Inf\b`, `%!`} {
		if at := regexp.MustCompile(bad).FindIndex(text); at != nil {
			t.Errorf("%s in the page: ...%.80s", bad, text[max(0, at[0]-20):])
		}
	}
	d := xml.NewDecoder(bytes.NewReader(text))
	d.Entity = xml.HTMLEntity
	svgs, rows := 0, 0
	for {
		tok, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("the page isn't well-formed: %v", err)
		}
		e, ok := tok.(xml.StartElement)
		if !ok {
			continue
		}
		switch e.Name.Local {
		case "svg":
			if attr(e, "role") == "img" {
				svgs++
				if attr(e, "aria-label") == "" || attr(e, "viewBox") == "" {
					t.Errorf("a plot without a label or a viewBox: %v", e.Attr)
				}
			}
		case "path":
			inside(t, attr(e, "d"))
		case "tr":
			if attr(e, "class") != "" {
				rows++
			}
		}
	}
	if svgs != plots {
		t.Errorf("%d plots, want %d", svgs, plots)
	}
	if rows == 0 {
		t.Errorf("no row of a policy in the table")
	}
}

func attr(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

// inside fails if a path leaves its picture, or the largest there is.
func inside(t *testing.T, path string) {
	t.Helper()
	for _, text := range regexp.MustCompile(`-?[0-9.]+(e[+-]?[0-9]+)?`).FindAllString(path, -1) {
		var v float64
		if _, err := fmt.Sscan(text, &v); err != nil || math.Abs(v) > 1000 {
			t.Fatalf("%q (%v) in a path: %.80s", text, err, path)
		}
	}
}

func TestUnwritable(t *testing.T) {
	if code := command(with("-html", "none", "-policies", "alone", "-q"), failing{}, io.Discard); code != 1 {
		t.Errorf("exit code %d for a closed stdout, want 1", code)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("closed") }

func TestUnit(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 s", 40: "40 ns", 25 * time.Microsecond: "25 µs", 2300 * time.Millisecond: "2.3 s", 500 * time.Millisecond: "500 ms", 425 * time.Second: "425 s",
	} {
		if got := unit(d); got != want {
			t.Errorf("%d ns is %q, want %q", d, got, want)
		}
	}
}
