package sim_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/internal/sim"
)

// slice reads one of the slices in testdata.
func slice(t *testing.T, name string) []sim.Record {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rs, err := sim.ReadTrace(f)
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

func TestReadTrace(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name, text string
		want       []sim.Record
	}{
		{"Azure", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:47.6815900,396,109\r\n", []sim.Record{
			{Prompt: 374, Output: 44}, {At: 1001 * ms, Prompt: 396, Output: 109},
		}},
		{"Azure in seconds, other columns, out of order", "\ufeffPriority,model,GeneratedTokens,timestamp,ContextTokens\n-2,x,7,12.5,5\n3,y,8,12.25,6\n", []sim.Record{
			{Prompt: 6, Output: 8, Priority: 3, Prioritized: true}, {At: 250 * ms, Prompt: 5, Output: 7, Priority: -2, Prioritized: true},
		}},
		{"empty answers count as one token", "TIMESTAMP,ContextTokens,GeneratedTokens\n0,0,0\n", []sim.Record{{Prompt: 1, Output: 1}}},
		{"Mooncake", `{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 14]}` + "\n\n" +
			`{"timestamp": 1500.5, "input_length": 7, "output_length": 8, "hash_ids": [18446744073709551615], "priority": -1}`, []sim.Record{
			{Prompt: 600, Output: 5, Hashes: []uint64{0, 14}},
			{At: 500*ms + ms/2, Prompt: 7, Output: 8, Hashes: []uint64{1<<64 - 1}, Priority: -1, Prioritized: true},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := sim.ReadTrace(strings.NewReader(c.text))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

func TestReadTraceRefuses(t *testing.T) {
	const azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n"
	const mooncake = `{"timestamp": 1, "input_length": 2, "output_length": 3}` + "\n"
	for _, c := range []struct{ name, text, want string }{
		{"nothing", "", "empty"},
		{"no requests", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "without a request"},
		{"no column", "TIMESTAMP,ContextTokens\n1,2\n", "line 1: no column generatedtokens"},
		{"a field too few", azure + "1,2\n", "line 3"},
		{"a time that is none", azure + "yesterday,2,3\n", `line 3: timestamp "yesterday"`},
		{"a time that is not a number", azure + "NaN,2,3\n", "line 3: timestamp"},
		{"a time out of range", azure + "1e30,2,3\n", "line 3: timestamp"},
		{"times too far apart", "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,2,3\n9999-01-01 00:00:00,2,3\n", "line 3: timestamp"},
		{"tokens that are no number", azure + "1,two,3\n", "line 3"},
		{"negative tokens", azure + "1,2,-3\n", "line 3: -3 tokens"},
		{"huge tokens", azure + "1,999999999999,3\n", "line 3: 999999999999 tokens"},
		{"tokens beyond any integer", azure + "1,99999999999999999999999,3\n", "line 3"},
		{"a priority that is none", "TIMESTAMP,ContextTokens,GeneratedTokens,Priority\n1,2,3,high\n", "line 2"},
		{"no JSON", mooncake + "{\n", "line 2"},
		{"JSON's negative tokens", mooncake + `{"timestamp": 1, "input_length": -2, "output_length": 3}`, "line 2: -2 tokens"},
		{"JSON's huge tokens", mooncake + `{"timestamp": 1, "input_length": 2, "output_length": 99999999}`, "line 2: 99999999 tokens"},
		{"JSON's time out of range", mooncake + `{"timestamp": -1e300, "input_length": 2, "output_length": 3}`, "line 2: timestamp"},
		{"JSON's tokens beyond any integer", mooncake + `{"timestamp": 1, "input_length": 1e40, "output_length": 3}`, "line 2"},
		{"a line without an end", mooncake + `{"timestamp": 1` + strings.Repeat(" ", 17<<20), "line 2"},
		{"JSON's hash that is none", mooncake + `{"timestamp": 1, "input_length": 1, "output_length": 3, "hash_ids": [-1]}`, "line 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rs, err := sim.ReadTrace(strings.NewReader(c.text))
			if err == nil {
				t.Fatalf("got %v, want an error", rs)
			}
			if !strings.HasPrefix(err.Error(), "sim: ") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %q, want it to say %q", err, c.want)
			}
		})
	}
}

func TestSlices(t *testing.T) {
	for _, c := range []struct {
		name   string
		rows   int
		hashes bool
	}{{"azure-code.csv", 400, false}, {"azure-conv.csv", 400, false}, {"mooncake-conversation.jsonl", 300, true}} {
		rs := slice(t, c.name)
		if len(rs) != c.rows {
			t.Errorf("%s: got %d records, want %d", c.name, len(rs), c.rows)
		}
		for i, r := range rs {
			if blocks := (r.Prompt + sim.HashTokens - 1) / sim.HashTokens; c.hashes && len(r.Hashes) != blocks {
				t.Errorf("%s: record %d has %d hashes for %d tokens, want %d", c.name, i, len(r.Hashes), r.Prompt, blocks)
			}
		}
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n")
	f.Add(`{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [1]}`)
	for _, name := range []string{"azure-code.csv", "azure-conv.csv", "mooncake-conversation.jsonl"} {
		text, err := os.ReadFile("testdata/" + name)
		if err != nil {
			f.Fatal(err)
		}
		lines := strings.SplitAfterN(string(text), "\n", 5)
		f.Add(strings.Join(lines[:4], ""))
	}
	f.Fuzz(func(t *testing.T, text string) {
		rs, err := sim.ReadTrace(strings.NewReader(text))
		if err != nil {
			return
		}
		last := time.Duration(0)
		for _, r := range rs {
			if r.Prompt < 1 || r.Output < 1 || r.At < last {
				t.Errorf("record %+v after %v", r, last)
			}
			last = r.At
		}
	})
}
