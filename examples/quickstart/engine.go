package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/extevict/extevict/internal/engine"
)

const (
	blockSize    = 16   // tokens in a KV block
	batchPrompt  = 1500 // tokens
	urgentPrompt = 200
	urgentTokens = 32
)

// kvBlocks returns how many KV blocks a request holds at its end.
func kvBlocks(prompt, tokens int) int { return (prompt + tokens - 1 + blockSize - 1) / blockSize }

// An engineServer is an engine that listens.
type engineServer struct {
	addr   string
	blocks int // of its KV cache
	close  func()
}

// startEngine starts an engine that runs so many requests at once, and tells onEnd of the
// end of each. Its KV cache has a quarter more than they need in the end: what is short
// here are places in the batch.
func startEngine(requests, tokens int, onEnd func(engine.End)) (*engineServer, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	blocks := (requests*kvBlocks(batchPrompt, tokens) + kvBlocks(urgentPrompt, urgentTokens)) * 5 / 4
	e := engine.NewServer(engine.Config{BlockSize: blockSize, Blocks: blocks, MaxSeqs: requests, OnEnd: onEnd})
	server := &http.Server{Handler: e}
	go server.Serve(l) // ends with server.Close
	return &engineServer{addr: l.Addr().String(), blocks: blocks, close: func() {
		server.Close()
		e.Close()
	}}, nil
}

// A sample is what the engine's /metrics say.
type sample struct {
	at               time.Time // when they were here
	running, waiting int
	kv               float64 // used part of the KV cache
	preemptions      int     // by the engine itself, so far
	err              error   // why there is none
}

// tokens returns how many fit into its KV cache.
func (e *engineServer) tokens() int64 { return int64(e.blocks) * blockSize }

// scrape reads /metrics every two milliseconds into ch, until ctx is done or it fails.
func (e *engineServer) scrape(ctx context.Context, ch chan<- sample) {
	transport := new(http.Transport)
	defer transport.CloseIdleConnections()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		s, err := e.sample(ctx, &http.Client{Transport: transport})
		if err != nil {
			s.err = fmt.Errorf("reading /metrics: %w", err)
		}
		select {
		case ch <- s:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
		<-tick.C
	}
}

func (e *engineServer) sample(ctx context.Context, c *http.Client) (s sample, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+e.addr+"/metrics", nil)
	if err != nil {
		return s, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return s, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, _, _ := strings.Cut(lines.Text(), "{")
		value, err := strconv.ParseFloat(lines.Text()[strings.LastIndexByte(lines.Text(), ' ')+1:], 64)
		if err != nil {
			continue // a comment
		}
		switch name {
		case "vllm:num_requests_running":
			s.running = int(value)
		case "vllm:num_requests_waiting":
			s.waiting = int(value)
		case "vllm:kv_cache_usage_perc":
			s.kv = value
		case "vllm:num_preemptions_total":
			s.preemptions = int(value)
		}
	}
	s.at = time.Now()
	return s, lines.Err()
}
