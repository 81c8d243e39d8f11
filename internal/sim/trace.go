package sim

import (
	"bufio"
	"cmp"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Record is one request of a trace.
type Record struct {
	At             time.Duration // since the first one
	Prompt, Output int           // tokens, at least 1 each
	Hashes         []uint64      // of the prompt's blocks of HashTokens tokens, each with all before it; may be nil
	Priority       int           // higher matters more
	Prioritized    bool          // the trace says Priority
}

// HashTokens is the size of a block that one hash of a Mooncake trace stands for.
const HashTokens = 512

const (
	maxTokens = 1 << 24           // in one prompt or answer: more is a mistake in the trace
	maxSpan   = 1e9 * time.Second // of a time from zero, or from the first one
)

// ReadTrace reads a trace of either known format, which its first byte tells:
//
//   - CSV as Azure publishes it: TIMESTAMP,ContextTokens,GeneratedTokens, with a time or seconds for
//     the timestamp, in any order of columns, and perhaps a column Priority;
//   - JSON lines as Mooncake publishes it: timestamp (ms), input_length, output_length, and perhaps
//     hash_ids and priority.
//
// Records come out in order of time. An error names the line.
func ReadTrace(r io.Reader) ([]Record, error) {
	b := bufio.NewReaderSize(r, 1<<16)
	head, err := b.Peek(1)
	if err != nil {
		return nil, fmt.Errorf("sim: empty trace: %w", err)
	}
	var rs []Record
	if head[0] == '{' {
		rs, err = readMooncake(b)
	} else {
		rs, err = readAzure(b)
	}
	if err != nil {
		return nil, fmt.Errorf("sim: %w", err)
	}
	if len(rs) == 0 {
		return nil, errors.New("sim: a trace without a request")
	}
	slices.SortStableFunc(rs, func(a, b Record) int { return cmp.Compare(a.At, b.At) })
	for first, i := rs[0].At, 0; i < len(rs); i++ {
		rs[i].At -= first
	}
	return rs, nil
}

func readAzure(r io.Reader) (rs []Record, err error) {
	c := csv.NewReader(r)
	c.ReuseRecord = true
	head, err := c.Read()
	if err != nil {
		return nil, err
	}
	column := map[string]int{}
	for i, name := range head {
		column[strings.ToLower(strings.TrimSpace(strings.TrimPrefix(name, "\ufeff")))] = i
	}
	for _, name := range []string{"timestamp", "contexttokens", "generatedtokens"} {
		if _, ok := column[name]; !ok {
			return nil, fmt.Errorf("line 1: no column %s", name)
		}
	}
	priority, prioritized := column["priority"]
	var epoch *time.Time
	for {
		row, err := c.Read()
		if err == io.EOF {
			return rs, nil
		}
		if err != nil {
			return nil, err
		}
		line, _ := c.FieldPos(0)
		fail := func(err error) ([]Record, error) { return nil, fmt.Errorf("line %d: %w", line, err) }
		rec := Record{Prioritized: prioritized}
		stamp := row[column["timestamp"]]
		if t, err := time.Parse("2006-01-02 15:04:05", stamp); err == nil {
			if epoch == nil {
				epoch = &t
			}
			if rec.At = t.Sub(*epoch); rec.At.Abs() > maxSpan {
				return fail(fmt.Errorf("timestamp %q", stamp))
			}
		} else if s, err := strconv.ParseFloat(stamp, 64); err == nil && math.Abs(s) < maxSpan.Seconds() {
			rec.At = time.Duration(s * float64(time.Second))
		} else {
			return fail(fmt.Errorf("timestamp %q", stamp))
		}
		if rec.Prompt, err = tokens(row[column["contexttokens"]]); err != nil {
			return fail(err)
		}
		if rec.Output, err = tokens(row[column["generatedtokens"]]); err != nil {
			return fail(err)
		}
		if prioritized {
			if rec.Priority, err = strconv.Atoi(row[priority]); err != nil {
				return fail(err)
			}
		}
		rs = append(rs, rec)
	}
}

func tokens(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, err
	}
	return checked(n)
}

func checked(n int) (int, error) {
	if n < 0 || n > maxTokens {
		return 0, fmt.Errorf("%d tokens", n)
	}
	return max(n, 1), nil
}

func readMooncake(r io.Reader) (rs []Record, err error) {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 16<<20)
	line := 1
	for ; s.Scan(); line++ {
		if len(strings.TrimSpace(s.Text())) == 0 {
			continue
		}
		var m struct {
			Timestamp    float64  `json:"timestamp"`
			InputLength  int      `json:"input_length"`
			OutputLength int      `json:"output_length"`
			HashIDs      []uint64 `json:"hash_ids"`
			Priority     *int     `json:"priority"`
		}
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		if !(math.Abs(m.Timestamp) < 1000*maxSpan.Seconds()) {
			return nil, fmt.Errorf("line %d: timestamp %v", line, m.Timestamp)
		}
		rec := Record{At: time.Duration(m.Timestamp * float64(time.Millisecond)), Hashes: m.HashIDs}
		if rec.Prompt, err = checked(m.InputLength); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		if rec.Output, err = checked(m.OutputLength); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		if m.Priority != nil {
			rec.Priority, rec.Prioritized = *m.Priority, true
		}
		rs = append(rs, rec)
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", line, err)
	}
	return rs, nil
}
